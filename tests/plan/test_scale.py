"""Schedules of millions of actions: what is done per action does not grow with the pipeline.

Work is counted, not timed: lines of the engine that are executed, which is exact and the same on every machine. What
numpy does within a line is not seen; `scripts/bench scale` measures seconds and bytes at full size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from program_strategies import EVERY

from engine.plan.lowering import lower
from engine.plan.schedules import build
from engine.plan.simulate import Costs, simulate
from engine.plan.verify import verify

SMALL, LARGE = 4, 24  # ranks, with four micro-batches for each


def lines(work: Callable[[], Any]) -> tuple[int, Any]:
    """How many lines of the engine `work` executes, and what it returns."""
    count = 0

    def local(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def entered(frame: FrameType, event: str, argument: object) -> Any:
        return local if "/engine/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        result = work()
    finally:
        sys.settrace(before)
    return count, result


def per_action(name: str, ranks: int) -> dict[str, float]:
    """Lines per action of building, proving (lowered too) and simulating."""
    found = {}
    found["build"], program = lines(lambda: build(name, ranks, 4 * ranks))
    found["lower"], lowered = lines(lambda: lower(program, reduce=True, step=True))
    found["verify"], _ = lines(lambda: (verify(program), verify(lowered)))
    costs = Costs.from_settings({}, program.placement, program.microbatches)
    found["simulate"], _ = lines(lambda: simulate(program, costs))
    return {step: count / len(program) for step, count in found.items()}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.slow(keep=6)
def test_work_is_linear_in_the_number_of_actions(name: str) -> None:
    small, large = per_action(name, SMALL), per_action(name, LARGE)
    for step, count in large.items():
        assert count <= 1.25 * small[step] + 1, f"{step}: {small[step]:.1f} lines per action, then {count:.1f}"


def test_work_that_is_not_linear_is_seen() -> None:
    code = compile("for i in range(n):\n    for j in range(n):\n        pass\n", "/engine/quadratic.py", "exec")
    few, many = (lines(lambda n=n: exec(code, {"n": n}))[0] for n in (5, 20))
    assert many > 10 * few
