"""scripts/bench waterfall [CASE ...] [--json FILE]

Makes one thing slow at a time in real runs of `model=sleep` (two replicas of GPipe on 4 ranks, 8 micro-batches, 10 ms
forward and 20 ms backward) and compares the bars of the run's waterfall with those of a run without: the bar of what
was made slow has to grow by what was put in, within a tenth, and the others have to stay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.sides import LOOPBACK, ours_command, run_together
from engine.report.tables import table
from engine.report.waterfall import BARS

RANKS, MICROBATCHES, FORWARD, BACKWARD = 4, 8, 10.0, 20.0
TOLERANCE = 0.1  # of what was put in
_USUAL = ("model=sleep", "data=synthetic", "data.shape=[16]", "train.global_batch_size=16", "data_parallel.replicas=2",
          "model.forward_ms=10", "model.input_backward_ms=10", "model.weight_backward_ms=10")  # fmt: skip


@dataclass(frozen=True)
class Slow:
    """What is made slow, by which arguments; milliseconds by which the bar `bar` has to grow, and others with it."""

    keys: tuple[str, ...]
    bar: str
    amount: float
    others: Mapping[str, float] = field(default_factory=dict)


def makespan(costs: Sequence[float]) -> float:
    """Of GPipe, in ms, for stages of so many times the usual cost: closed form."""
    return (sum(costs) + (MICROBATCHES - 1) * max(costs)) * (FORWARD + BACKWARD)


def _listed(stage: int, times: int) -> tuple[str, ...]:
    each = [10 * times if s == stage else 10 for s in range(RANKS)]
    return tuple(
        f"model.{part}_ms={each}".replace(" ", "") for part in ("forward", "input_backward", "weight_backward")
    )


_MORE = 0.5 * (FORWARD + BACKWARD)  # what one stage of four, three times as slow, adds to the mean stage
CASES = {
    "stage": Slow(
        _listed(1, 3), "imbalance", makespan([1, 3, 1, 1]) - makespan([1.5] * 4),
        {"work": MICROBATCHES * _MORE, "schedule": (RANKS - 1) * _MORE},
    ),
    "microbatch": Slow(("delay.ranks=[[2,60,3]]",), "variation", 60),
    "link": Slow(("delay.links=[[1,2,40],[2,1,40],[5,6,40],[6,5,40]]",), "transfer", 80),
    # Two loads of 8 samples, on the first rank and on the last, behind each other's back and the bubble's.
    "loader": Slow(("delay.sample_ms=30",), "data", 8 * 30 - (RANKS - 1) * (FORWARD + BACKWARD)),
    "reduction": Slow(("delay.links=[[0,4,40],[4,0,40]]",), "reduce", 80),  # a ring of two sends twice
    "replica": Slow(
        ("delay.ranks=[[4,20],[5,20],[6,20],[7,20]]",), "reduce", 20.0 * (MICROBATCHES + RANKS - 1),
    ),
}  # fmt: skip


def run(keys: Sequence[str]) -> dict[str, Any]:
    """The waterfall of one run in ms, and the last line of what it says of the cause."""
    case = Case("waterfall", "gpipe", RANKS, MICROBATCHES, steps=8, choices=(*_USUAL, *keys))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_together([[*ours_command(case), f"hydra.run.dir={folder / 'run'}"]], folder, LOOPBACK)
        found = json.loads((folder / "run" / "summary.json").read_text())["waterfall"]
        said = (folder / "run" / "report.txt").read_text().split("\n\n")
        advice = said[1 + said.index("Bubble") + 1] if "Bubble" in said else ""
    return {"bars": {bar: 1e3 * found[bar] for bar in BARS}, "measured": 1e3 * found["measured"], "advice": advice}


def judged(slow: Slow, usual: Mapping[str, float], found: Mapping[str, float]) -> dict[str, Any]:
    """How each bar grew, how it should have, and whether that is within a tenth of what was put in."""
    grown = {bar: found[bar] - usual[bar] for bar in BARS}
    expected = {bar: slow.amount if bar == slow.bar else slow.others.get(bar, 0.0) for bar in BARS}
    within = {bar: abs(grown[bar] - expected[bar]) <= TOLERANCE * slow.amount for bar in BARS}
    return {"grown": grown, "expected": expected, "within": within}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench waterfall", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    usual = run(())
    rows = [["ms", *BARS, "measured"], ["usual", *(f"{usual['bars'][bar]:.1f}" for bar in BARS), _ms(usual)]]
    results: dict[str, Any] = {"usual": usual}
    for name in given.cases or CASES:
        found = run(CASES[name].keys)
        results[name] = found | judged(CASES[name], usual["bars"], found["bars"])
        rows.append([name, *(_cell(results[name], bar) for bar in BARS), _ms(found)])
    print(table(rows))
    print("Cells say how a bar grew and, where it should have, by how much; ! marks what is off by more than a tenth.")
    for name, result in results.items():
        print(f"{name}: {result['advice']}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


def _ms(result: Mapping[str, Any]) -> str:
    return f"{result['measured']:.1f}"


def _cell(result: Mapping[str, Any], bar: str) -> str:
    expected = result["expected"][bar]
    aim = f" of {expected:.1f}" if expected else ""
    return f"{result['grown'][bar]:+.1f}{aim}{'' if result['within'][bar] else ' !'}"
