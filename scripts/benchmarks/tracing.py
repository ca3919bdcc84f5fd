"""scripts/bench tracing [--repeats N] [--json FILE]

What it costs to look: nanoseconds to record an action, and the step time of `gpt` (2 ranks) and of `tiny` (next to no
work per action, 4 ranks) with every step traced and with none but the first, in turn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.cases import GPT, TINY, Case
from benchmarks.options import parser
from benchmarks.sides import run_ours
from engine.plan.timeline import Kind
from engine.report.tables import table
from engine.runtime.trace import Tracer

NEVER = 10**9
ROUNDS, ACTIONS = 200, 200


def per_action_ns(on: bool) -> float:
    """The median over rounds of what two marks and a span take, and the step's end with it."""
    tracer, found = Tracer(), []
    tracer.on = on
    for _ in range(ROUNDS):
        begun = time.perf_counter_ns()
        for action in range(ACTIONS):
            start = tracer.mark()
            tracer.add(Kind.F, 0, action, start, tracer.mark())
        tracer.finish()
        found.append((time.perf_counter_ns() - begun) / ACTIONS)
    return median(found)


def per_step(case: Case, repeats: int) -> dict[str, Any]:
    """Seconds of a step, traced and not: every run, and the median of each."""
    found: dict[str, list[float]] = {"traced": [], "not traced": []}
    for repeat in range(repeats):
        print(f"{case.name}: run {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for label, every in (("traced", 1), ("not traced", NEVER)):
            found[label].append(run_ours(replace(case, choices=(*case.choices, f"trace.every={every}"))).step_s)
    traced, plain = median(found["traced"]), median(found["not traced"])
    actions = 2 * case.microbatches
    return {"runs": found, "traced_s": traced, "plain_s": plain, "share": traced / plain - 1,
            "per_action_s": (traced - plain) / actions}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    options = parser("tracing", __doc__)
    given = options.parse_args(arguments)
    recording = {"traced": per_action_ns(True), "not traced": per_action_ns(False)}
    print("nanoseconds to record an action: " + ", ".join(f"{label} {ns:.0f}" for label, ns in recording.items()))
    results = {case.name: per_step(case, given.repeats) for case in (GPT, TINY)}
    rows = [["case", "traced ms", "not traced ms", "costs", "us per action"]]
    for name, result in results.items():
        times = (f"{result[key] * 1e3:.3f}" for key in ("traced_s", "plain_s"))
        rows.append([name, *times, f"{100 * result['share']:+.2f} %", f"{result['per_action_s'] * 1e6:+.1f}"])
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps({"per_action_ns": recording, "steps": results}, indent=1))
