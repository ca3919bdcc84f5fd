"""What is computed from the measurements: pure, so that it can be tested without running anything.

The critical path of a schedule is its makespan when every action takes as long as it was seen to take and messages
take no time. It is formed from each run's own durations, because a sleep of 5 ms takes more than 5 ms. What a step
takes beyond it is the run's excess: transfers, the interpreter, and waiting for either.

    excess = step / critical path - 1          share = excess of ours / excess of the peer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from engine.plan.schedules import build
from engine.plan.simulate import Costs, simulate


@dataclass(frozen=True)
class Run:
    """One run of one side: seconds per step; of a pipeline "F" and "B" -> median seconds of an action, per stage."""

    step_s: float
    durations: Mapping[str, Sequence[float]] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


def step_time(ends: Sequence[float], warmup: int) -> float:
    """Median period between consecutive step ends of one rank, the first `warmup` steps left out."""
    kept = ends[warmup:]
    if len(kept) < 2:
        raise ValueError(f"{len(ends)} step ends leave no period after {warmup} steps of warm-up; run more steps")
    return median(b - a for a, b in pairwise(kept))


def critical_path(schedule: str, ranks: int, microbatches: int, durations: Mapping[str, Sequence[float]]) -> float:
    """Seconds that a step of `schedule` takes where each action takes its stage's duration and transfer is free."""
    halves = [0.0] * ranks  # I and W: these schedules have full backwards only
    duration = np.array([durations["F"], durations["B"], halves, halves])[:, :, None]
    program = build(schedule, ranks, microbatches)
    return float(simulate(program, Costs(duration, np.zeros(ranks))).end.max())


def compare(
    schedule: str,
    ranks: int,
    microbatches: int,
    ours: Sequence[Run],
    peer: Sequence[Run],
    plain: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """One row: each side's runs and medians, and their ratios. `ratio` below 1: ours is faster."""
    row: dict[str, Any] = {"schedule": schedule, "ranks": ranks, "microbatches": microbatches}
    for side, runs in (("ours", ours), ("peer", peer)):
        paths = [critical_path(schedule, ranks, microbatches, run.durations) for run in runs]
        excesses = [run.step_s / path - 1 for run, path in zip(runs, paths, strict=True)]
        row[side] = {
            "step_s": [run.step_s for run in runs],
            "median_s": median(run.step_s for run in runs),
            "critical_path_s": median(paths),
            "excess": median(excesses),
            "per_action_s": median(run.step_s for run in runs) / (2 * microbatches),
            "runs": [{"durations": run.durations, **run.details} for run in runs],
        }
    row["ratio"] = row["ours"]["median_s"] / row["peer"]["median_s"]
    row["share"] = share(row["ours"]["excess"], row["peer"]["excess"])
    row["plain"] = {label: {"step_s": list(times), "median_s": median(times)} for label, times in plain.items()}
    return row


def share(ours: float, peer: float) -> float | None:
    """Our part of the peer's excess; None where the peer has none to speak of."""
    return ours / peer if peer > 0 else None


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows as text: milliseconds per step, ratios, and excess over the critical path."""
    head = ["row", "ours ms", "peer ms", "ours/peer", "ours/critical", "peer/critical", "share of excess"]
    lines = [[*head, "us/action ours", "peer", "plain ms, 1 thread", "all threads"]]
    for name, row in rows.items():
        ours, peer, part = row["ours"], row["peer"], row["share"]
        lines.append(
            [
                name,
                *(f"{side['median_s'] * 1e3:.2f}" for side in (ours, peer)),
                f"{row['ratio']:.3f}",
                *(f"{1 + side['excess']:.3f}" for side in (ours, peer)),
                "-" if part is None else f"{part:.2f}",
                *(f"{side['per_action_s'] * 1e6:.0f}" for side in (ours, peer)),
                *(
                    f"{row['plain'][label]['median_s'] * 1e3:.2f}" if row["plain"] else "-"
                    for label in ("1 thread", "all threads")
                ),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
