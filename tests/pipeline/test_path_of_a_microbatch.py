"""How many modules a micro-batch passes from the first forward of a step to its last backward."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from harness import run_threads, settings

from engine.pipeline.executor import Executor
from engine.plan.actions import Program

MOST = 40


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipe"])
def test_a_microbatch_passes_few_modules(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are the modules of the engine in which a function is called while a rank executes its rows."""
    passed: set[str] = set()
    run = Executor.run

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            passed.add(str(frame.f_globals.get("__name__")))

    def noted(executor: Executor, program: Program, feed: Any) -> None:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            run(executor, program, feed)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(Executor, "run", noted)
    run_threads(settings(schedule, 2, 4, 2))
    ours = {name for name in passed if name.split(".")[0] == "engine"}
    assert {"engine.pipeline.executor", "engine.pipeline.stage.stage"} <= ours
    assert any(name.startswith("engine.transport") for name in ours)
    assert len(ours) < MOST, sorted(ours)
