"""What is computed from the measurements: pure, so that it can be tested without running anything.

The critical path of a step is the time from its end to the end of the next where the program is repeated, every action
takes as long as it took in that step, and messages take no time: the makespan, but for schedules whose ranks end a step
one after another and begin the next in that order, which hides the askew ends. It is formed from each step's own
durations, because a sleep of 5 ms takes more than 5 ms, and now and then much more. What a step takes beyond it is its
excess: transfers, the interpreter, and waiting for either.

    excess = step / critical path - 1, the median over steps          share = excess of ours / excess of the peer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from engine.account.replay.replay import Replay
from engine.plan.actions import COMPUTE, Program
from engine.plan.dependencies import Flat

# op ("F", "B", "I", "W") -> seconds, per stage and micro-batch; 0 where there is no such action
Durations = Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Step:
    """One step of a run: what it took, and what each of its actions took."""

    seconds: float
    durations: Durations


@dataclass(frozen=True)
class Run:
    """One run of one side: seconds per step; of a pipeline also what it executed, compute only, and some steps in
    detail."""

    step_s: float
    program: Program | None = None
    steps: Sequence[Step] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


def step_time(ends: Sequence[float], warmup: int) -> float:
    """Median period between consecutive step ends of one rank, the first `warmup` steps left out."""
    kept = ends[warmup:]
    if len(kept) < 2:
        raise ValueError(f"{len(ends)} step ends leave no period after {warmup} steps of warm-up; run more steps")
    return median(b - a for a, b in pairwise(kept))


def critical_path(program: Program, durations: Durations) -> float:
    """Seconds from step to step where each action takes its own duration and transfer is free."""
    none = np.zeros((program.stages, program.microbatches))
    table = np.array([durations.get(op.name, none) for op in COMPUTE])
    flat = Flat(program)
    return Replay(program, replicas=1).period(duration=table[flat.op, flat.stage, flat.microbatch])


def compare(
    ours: Sequence[Run],
    peer: Sequence[Run],
    plain: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """One row: each side's runs and medians, and their ratios. `ratio` below 1: ours is faster. No peer: None."""
    row: dict[str, Any] = {"ours": _side(ours), "peer": _side(peer) if peer else None, "ratio": None, "share": None}
    if peer:
        row["ratio"] = row["ours"]["median_s"] / row["peer"]["median_s"]
        row["share"] = share(row["ours"]["excess"], row["peer"]["excess"])
    row["plain"] = {label: {"step_s": list(times), "median_s": median(times)} for label, times in plain.items()}
    return row


def _side(runs: Sequence[Run]) -> dict[str, Any]:
    programs = [run.program for run in runs if run.program is not None]
    paths = [
        [critical_path(program, step.durations) for step in run.steps]
        for program, run in zip(programs, runs, strict=True)
    ]
    excess = [
        median(step.seconds / path - 1 for step, path in zip(run.steps, of_run, strict=True))
        for run, of_run in zip(runs, paths, strict=True)
    ]
    time = median(run.step_s for run in runs)
    return {
        "step_s": [run.step_s for run in runs],
        "median_s": time,
        "critical_path_s": median(median(of_run) for of_run in paths),
        "excess": median(excess),
        "excesses": excess,
        "per_action_s": time * programs[0].ranks / len(programs[0]),
        "runs": [{"steps": len(run.steps), **run.details} for run in runs],
    }


def share(ours: float, peer: float) -> float | None:
    """Our part of the peer's excess; None where the peer has none to speak of."""
    return ours / peer if peer > 0 else None


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows as text: milliseconds per step, ratios, and excess over the critical path."""
    head = ["row", "ours ms", "peer ms", "ours/peer", "ours/critical", "peer/critical", "share of excess"]
    lines = [[*head, "us/action ours", "peer", "plain ms, 1 thread", "all threads"]]
    for name, row in rows.items():
        sides = (row["ours"], row["peer"])
        lines.append(
            [
                name,
                *(_figure(side and side["median_s"] * 1e3, ".2f") for side in sides),
                _figure(row["ratio"], ".3f"),
                *(_figure(side and 1 + side["excess"], ".3f") for side in sides),
                _figure(row["share"], ".2f"),
                *(_figure(side and side["per_action_s"] * 1e6, ".0f") for side in sides),
                *(
                    f"{row['plain'][label]['median_s'] * 1e3:.2f}" if row["plain"] else "-"
                    for label in ("1 thread", "all threads")
                ),
            ]
        )
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
