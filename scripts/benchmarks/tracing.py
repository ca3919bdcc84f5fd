"""scripts/bench tracing [--repeats N] [--json FILE]

What it costs to look: nanoseconds to record an action, and the step time of `gpt` (2 ranks) and of `tiny` (next to no
work per action, 4 ranks) with every step traced and with none but the first, in pairs. That includes what the parent
does with traced steps on the processors of its workers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import GPT, TINY, Case
from benchmarks.options import parser
from benchmarks.sides import LOOPBACK, ours_command, run_together
from engine.plan.timeline import Kind
from engine.report.tables import table
from engine.runtime.trace import Tracer

NEVER = 10**9
TRACED = {"traced": 1, "not traced": NEVER}  # optimizer steps between traced ones
STEPS = {GPT: 60, TINY: 500}
MOST_SHARE, MOST_US = 0.01, 20
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
    """Seconds of a step of every run, in pairs of one traced and one not, one after the other in changing order."""
    found: dict[str, list[float]] = {label: [] for label in TRACED}
    for repeat in range(repeats):
        print(f"{case.name}: pair {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for label, every in sorted(TRACED.items(), reverse=bool(repeat % 2)):
            found[label].append(mean_step(replace(case, choices=(*case.choices, f"trace.every={every}"))))
    return {"runs": found} | compared(found["traced"], found["not traced"], 2 * case.microbatches)


def mean_step(case: Case) -> float:
    """Seconds: the mean over the steps of a run but the first. Steps are looked at now and then, so no median."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_together([[*ours_command(case), f"hydra.run.dir={folder / 'run'}"]], folder, LOOPBACK)
        summary = json.loads((folder / "run" / "summary.json").read_text())
        return float(summary["global_batch_size"] / summary["samples_per_second"])


def compared(traced: Sequence[float], plain: Sequence[float], actions: int) -> dict[str, Any]:
    """What tracing costs: `share` of the step and seconds per action of a rank, medians over pairs; all `shares`."""
    pairs = list(zip(traced, plain, strict=True))
    return {
        "traced_s": median(traced),
        "plain_s": median(plain),
        "shares": [with_it / without - 1 for with_it, without in pairs],
        "share": median(with_it / without - 1 for with_it, without in pairs),
        "per_action_s": median(with_it - without for with_it, without in pairs) / actions,
    }


def row(name: str, result: dict[str, Any]) -> list[str]:
    """Of the table that is printed. Long steps are judged by the share, others by what an action costs."""
    share, action = result["share"], result["per_action_s"] * 1e6
    good = share < MOST_SHARE if name == GPT.name else action < MOST_US
    times = (f"{result[key] * 1e3:.3f}" for key in ("traced_s", "plain_s"))
    spread = f"{100 * min(result['shares']):+.2f} .. {100 * max(result['shares']):+.2f} %"
    return [name, *times, f"{100 * share:+.2f} %", spread, f"{action:+.1f}", "right" if good else "too much"]


def main(arguments: Sequence[str]) -> None:
    options = parser("tracing", __doc__)
    given = options.parse_args(arguments)
    recording = {"traced": per_action_ns(True), "not traced": per_action_ns(False)}
    print("nanoseconds to record an action: " + ", ".join(f"{label} {ns:.0f}" for label, ns in recording.items()))
    results = {case.name: per_step(replace(case, steps=steps), given.repeats) for case, steps in STEPS.items()}
    head = ["case", "traced ms", "not traced ms", "costs", "of all pairs", "us per action", "verdict"]
    print(table([head, *(row(name, result) for name, result in results.items())]))
    print(
        f"Wanted: less than {MOST_SHARE:.0%} of a step of {GPT.name}, less than {MOST_US} us per action of {TINY.name}."
    )
    if given.json:
        given.json.write_text(json.dumps({"per_action_ns": recording, "steps": results}, indent=1))
