"""scripts/bench tracing [--repeats N] [--json FILE]

What it costs to look: nanoseconds to record an action, and what a step of `gpt` (2 ranks) and of `tiny` (next to no
work per action, 4 ranks) takes more where it is traced. Each run alternates between blocks of steps that are traced and
as many that are not, and each block is compared with the one after it, so that the machine's mood, which changes from
run to run by more than this costs, meets both. That includes what the parent does with traced steps on the processors
of its workers: it may look at steps for so much of a run's time, and does that in the traced half of these.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.cases import GPT, TINY, Case
from benchmarks.options import parser
from benchmarks.sides import LOOPBACK, ours_command, run_together
from engine.plan.timeline import Kind
from engine.tables import table
from engine.telemetry.trace import Tracer

BLOCK = {GPT: 5, TINY: 20}  # steps
PAIRS = 50  # of blocks in a run, after a first one that warms up
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
    """What tracing costs in so many runs, see `compared`."""
    pairs: list[tuple[float, float]] = []
    for repeat in range(repeats):
        print(f"{case.name}: run {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        pairs += blocks(seconds_of_steps(case, BLOCK[case]), BLOCK[case])[1:]
    return compared(pairs, 2 * case.microbatches)


def seconds_of_steps(case: Case, block: int) -> list[float]:
    """Of every step of a run, the first `block` of which are traced, as many not, and so on."""
    choices = (f"trace.every={2 * block}", f"trace.consecutive={block}")
    case = replace(case, steps=2 * block * (PAIRS + 1), choices=(*case.choices, *choices))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_together([[*ours_command(case), f"hydra.run.dir={folder / 'run'}"]], folder, LOOPBACK)
        summary = json.loads((folder / "run" / "summary.json").read_text())
        events = EventAccumulator(str(folder / "run"), size_guidance={"tensors": 0, "scalars": 0})
        events.Reload()
        rates = events.Scalars("throughput/samples_per_second")
    assert [each.step for each in rates] == list(range(case.steps)), "a curve of every step"
    return [float(summary["global_batch_size"]) / each.value for each in rates]


def blocks(seconds: Sequence[float], block: int) -> list[tuple[float, float]]:
    """Mean seconds of a step in each traced block, and in the block after it; the first step of each is left out: the
    parent still has to do with the one before."""
    starts = range(0, len(seconds) - 2 * block + 1, 2 * block)
    return [(mean(seconds[at + 1 : at + block]), mean(seconds[at + block + 1 : at + 2 * block])) for at in starts]


def compared(pairs: Sequence[tuple[float, float]], actions: int) -> dict[str, Any]:
    """What tracing costs on average, from pairs of seconds with and without: seconds per action of a rank, and the
    `share` of the step, give or take `error`, twice its standard error."""
    more = [traced - plain for traced, plain in pairs]
    plain_s = mean(plain for _, plain in pairs)
    return {
        "traced_s": mean(traced for traced, _ in pairs),
        "plain_s": plain_s,
        "pairs": list(pairs),
        "share": mean(more) / plain_s,
        "error": 2 * stdev(more) / math.sqrt(len(more)) / plain_s,
        "per_action_s": mean(more) / actions,
    }


def row(name: str, result: dict[str, Any]) -> list[str]:
    """Of the table that is printed. Long steps are judged by the share, others by what an action costs."""
    share, action = result["share"], result["per_action_s"] * 1e6
    good = share < MOST_SHARE if name == GPT.name else action < MOST_US
    times = (f"{result[key] * 1e3:.3f}" for key in ("traced_s", "plain_s"))
    costs = f"{100 * share:+.2f} % (± {100 * result['error']:.2f})"
    return [name, *times, costs, f"{action:+.1f}", "right" if good else "too much"]


def main(arguments: Sequence[str]) -> None:
    options = parser("tracing", __doc__)
    given = options.parse_args(arguments)
    recording = {"traced": per_action_ns(True), "not traced": per_action_ns(False)}
    print("nanoseconds to record an action: " + ", ".join(f"{label} {ns:.0f}" for label, ns in recording.items()))
    results = {case.name: per_step(case, given.repeats) for case in BLOCK}
    head = ["case", "traced ms", "not traced ms", "costs", "us per action", "verdict"]
    print(table([head, *(row(name, result) for name, result in results.items())]))
    print(
        f"Wanted: less than {MOST_SHARE:.0%} of a step of {GPT.name}, less than {MOST_US} us per action of {TINY.name}."
    )
    if given.json:
        given.json.write_text(json.dumps({"per_action_ns": recording, "steps": results}, indent=1))
