"""scripts/bench waterfall [CASE ...] [--repeats N] [--json FILE]

Makes one thing slow at a time in real runs of `model=sleep` (two replicas of GPipe on 4 ranks, 8 micro-batches, 10 ms
forward and 20 ms backward), each after a run without, and compares the bars of their waterfalls. What is injected is
partly hidden, behind the bubble or behind another delay, and costs the step nothing there; the rest is exposed. The
step's growth has to be in the bar of what was made slow, within a tenth of what is exposed, the others have to stay,
and a stage or replica that is slow has to be named by the report. The exit status is 1 where one is not so.

Bars are medians over the steps of a run but for the first, which warms up, and the last, which loads no next batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import Case
from benchmarks.options import parser
from benchmarks.sides import LOOPBACK, ours_command, run_together
from engine.account.replay.waterfall import BARS
from engine.tables import table

RANKS, MICROBATCHES, FORWARD, BACKWARD, STEPS = 4, 8, 10.0, 20.0, 12
BOTH = FORWARD + BACKWARD
TOLERANCE = 0.1  # of what is exposed
_USUAL = ("model=sleep", "data=synthetic", "data.shape=[16]", "train.global_batch_size=16", "data_parallel.replicas=2",
          "model.forward_ms=10", "model.input_backward_ms=10", "model.weight_backward_ms=10")  # fmt: skip


@dataclass(frozen=True)
class Slow:
    """What is made slow, by which arguments. Milliseconds of a step: `injected` into one replica, all delays together;
    by which the bar `bar` has to grow, and others with it. `named`: what the report has to say."""

    keys: tuple[str, ...]
    injected: float
    bar: str
    amount: float
    others: Mapping[str, float] = field(default_factory=dict)
    named: str = ""

    @property
    def exposed(self) -> float:
        """What the step has to grow by."""
        return self.amount + sum(self.others.values())


def makespan(costs: Sequence[float]) -> float:
    """Of GPipe, in ms, for stages of so many times the usual cost: closed form."""
    return (sum(costs) + (MICROBATCHES - 1) * max(costs)) * BOTH


def _listed(stage: int, times: int) -> tuple[str, ...]:
    each = [10 * times if s == stage else 10 for s in range(RANKS)]
    return tuple(
        f"model.{part}_ms={each}".replace(" ", "") for part in ("forward", "input_backward", "weight_backward")
    )


_MORE = 0.5 * BOTH  # what one stage of four, three times as slow, adds to the mean stage
CASES = {
    "stage": Slow(
        _listed(1, 3), 2 * MICROBATCHES * BOTH, "imbalance", makespan([1, 3, 1, 1]) - makespan([1.5] * 4),
        {"work": MICROBATCHES * _MORE, "schedule": (RANKS - 1) * _MORE}, "stage 1 takes",
    ),
    "microbatch": Slow(("delay.ranks=[[2,60,3]]",), 60, "variation", 60),
    # Only the first activation and the last gradient have nothing else on their way.
    "link": Slow(("delay.links=[[1,2,40],[2,1,40],[5,6,40],[6,5,40]]",), 2 * MICROBATCHES * 40, "transfer", 80),
    # The first rank and the last load 8 samples each, at the same time, while they wait for their first message.
    "loader": Slow(("delay.sample_ms=30",), 2 * 8 * 30, "data", 8 * 30 - (RANKS - 1) * BOTH),
    # A ring of two sends twice, both at the same time.
    "reduction": Slow(("delay.links=[[0,4,40],[4,0,40]]",), 2 * 2 * 40, "reduce", 80),
    "replica": Slow(
        ("delay.ranks=[[4,20],[5,20],[6,20],[7,20]]",), RANKS * MICROBATCHES * 20, "reduce",
        20.0 * (MICROBATCHES + RANKS - 1), named="replica 1 is slower",
    ),
}  # fmt: skip


def run(keys: Sequence[str]) -> dict[str, Any]:
    """The bars of each step of one run in ms, [steps][bars], and what its report says of the cause."""
    case = Case("waterfall", "gpipe", RANKS, MICROBATCHES, steps=STEPS, choices=(*_USUAL, *keys))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_together([[*ours_command(case), f"hydra.run.dir={folder / 'run'}"]], folder, LOOPBACK)
        said = (folder / "run" / "report.txt").read_text().split("\n\n")
        return {"steps": steps_of(folder / "run"), "advice": said[said.index("Bubble") + 2]}


def steps_of(folder: Path) -> list[list[float]]:
    """The bars of each whole traced step of the run in this folder, in ms and in order, from its event file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports; none is about the run
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    columns = [[1e3 * point.value for point in events.Scalars(f"waterfall/{bar}")] for bar in BARS]
    return [list(bars) for bars in zip(*columns, strict=True)]


def usual_step(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each bar, and the `step` that they add up to: medians over the steps of all runs, each run's ends left out."""
    steps = [bars for found in runs for bars in found["steps"][1:-1]]
    bars = {bar: median(column) for bar, column in zip(BARS, zip(*steps, strict=True), strict=True)}
    return bars | {"step": median(map(sum, steps))}


def judged(slow: Slow, usual: Mapping[str, float], found: Mapping[str, float], advice: str) -> dict[str, Any]:
    """How the step and each bar grew, how they should have, which are as they should be, and what to make of it."""
    grown = {bar: found[bar] - usual[bar] for bar in ("step", *BARS)}
    wanted = {bar: slow.amount if bar == slow.bar else slow.others.get(bar, 0.0) for bar in BARS}
    wanted["step"] = slow.exposed
    wrong = [bar for bar in grown if abs(grown[bar] - wanted[bar]) > TOLERANCE * slow.exposed]
    wrong += ["not named"] if slow.named not in advice else []
    return {"grown": grown, "wanted": wanted, "verdict": ", ".join(wrong) or "right"}


def row(name: str, slow: Slow, result: Mapping[str, Any]) -> list[str]:
    """Of the table that is printed."""
    grown, wanted = result["grown"], result["wanted"]
    others = max((bar for bar in BARS if bar != slow.bar), key=lambda bar: abs(grown[bar] - wanted[bar]))
    figures = (slow.injected, slow.injected - slow.exposed, slow.exposed, grown["step"])
    return [
        name,
        *(f"{figure:.1f}" for figure in figures),
        slow.bar,
        *(f"{figure:.1f}" for figure in (slow.amount, grown[slow.bar])),
        f"{others} {grown[others] - wanted[others]:+.1f}",
        result["verdict"],
    ]


_HEAD = ["case", "injected", "hidden", "exposed", "step grew", "bar", "should grow", "grew", "worst other", "verdict"]


def main(arguments: Sequence[str]) -> None:
    options = parser("waterfall", __doc__)
    options.add_argument("cases", nargs="*", metavar="case", help=f"{', '.join(CASES)} (default: all)")
    options.set_defaults(repeats=1)
    given = options.parse_args(arguments)
    if unknown := [name for name in given.cases if name not in CASES]:
        options.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    rows, results = [_HEAD], {}
    for name in given.cases or CASES:
        usual, found = [], []
        for repeat in range(given.repeats):
            print(f"{name}: {repeat + 1} of {given.repeats}", file=sys.stderr, flush=True)
            usual.append(run(()))
            found.append(run(CASES[name].keys))
        medians = {"usual": usual_step(usual), "slow": usual_step(found)}
        advice = found[-1]["advice"]
        results[name] = medians | judged(CASES[name], medians["usual"], medians["slow"], advice) | {"advice": advice}
        rows.append(row(name, CASES[name], results[name]))
    print(table(rows))
    print("In ms of a step. The verdict names what is off by more than a tenth of what is exposed.")
    for name, result in results.items():
        print(f"{name}: {result['advice']}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    if any(result["verdict"] != "right" for result in results.values()):
        sys.exit(1)
