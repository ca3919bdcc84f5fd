"""What `plan.json` and the terminal say of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from engine.plan.actions import Placement, Program
from engine.plan.choose import choice_of
from engine.plan.simulate import Costs, Figures
from engine.plan.steady import LongRun
from engine.plan.timeline import Timeline
from engine.plan.views.grid import grid
from engine.plan.views.text import cells

MOST_LISTED = 100_000  # actions; above it plan.json names the CSV instead of listing the program
CSV_NAME = "program.csv"


def plan_summary(
    program: Program,
    lowered: Program,
    costs: Costs,
    timeline: Timeline,
    figures: Figures,
    layer_names_by_stage: Sequence[Sequence[str]] | None = None,
    long: LongRun | None = None,
) -> dict[str, Any]:
    """Return the content of `plan.json`; times in units of the costs.

    `program` and `lowered`: per rank a list of actions. `long` is given where the schedule is asynchronous: the bubble
    and the makespan are those of the window alone.
    """
    chosen = choice_of(program, lowered, figures, long)
    content: dict[str, Any] = {
        "schedule": program.name,
        "ranks": program.ranks,
        "stages": program.stages,
        "microbatches": program.microbatches,
        "placement": _placement(program.placement),
        "partition": [list(names) for names in layer_names_by_stage] if layer_names_by_stage is not None else None,
        "bubble_fraction": figures.bubble_fraction,
        "bubble_rate": figures.bubble_rate,
        "bubble_cost": figures.bubble_cost,
        "makespan": figures.makespan,
        "activations": chosen.peak,
        "transfers": chosen.transfers,
        "copies": chosen.copies,
        "per_rank": [
            {"rank": rank, "busy": f.busy, "idle": f.idle, "cost": f.cost, "peak_in_flight": f.peak_in_flight}
            for rank, f in enumerate(figures.per_rank)
        ],
        "costs": _costs(costs),
        "choice": asdict(chosen),  # a row of plan.compare
        "actions": len(program),
    }
    if program.placement.direction:
        content["direction"] = list(program.placement.direction)
    if long is not None:
        content["asynchronous"] = {
            "steady_bubble_fraction": long.steady.bubble,
            "steady_microbatch": long.steady.period,
            "staleness": long.staleness,
            "weight_versions": long.versions,
        }
    if len(program) > MOST_LISTED:
        return content | {"program_csv": CSV_NAME}
    return content | {"program": _listed(program), "lowered": _listed(lowered)}


def _placement(placement: Placement) -> list[int] | list[list[int]]:
    """Over stages: a rank, or a rank per direction where stages have copies."""
    if placement.copies == 1:
        return list(placement.rank_of[0])
    return [list(ranks) for ranks in zip(*placement.rank_of, strict=True)]


def _costs(costs: Costs) -> dict[str, list[float]]:
    """Per stage, the mean over micro-batches."""
    names = ("forward", "backward", "input_backward", "weight_backward")
    stages = len(costs.transfer)
    each = np.broadcast_to(costs.duration.mean(axis=-1), (len(names), stages))
    return dict(zip(names, each.tolist(), strict=True)) | {"transfer": costs.transfer.tolist()}


def _listed(program: Program) -> list[list[str]]:
    return [cells(program, rank) for rank in range(program.ranks)]


def plan_text(
    program: Program,
    lowered: Program,
    timeline: Timeline,
    figures: Figures,
    width: int = 120,
    long: LongRun | None = None,
) -> str:
    """Return the plan for a terminal: the timeline drawn, a table per rank, the figures."""
    chosen = choice_of(program, lowered, figures, long)
    sizes = f"{program.ranks} ranks, {program.stages} stages, {program.microbatches} micro-batches"
    lines = [
        f"{program.name}: {sizes}, {len(program)} computations",
        "",
        grid(timeline, width=width),
        "",
        "rank        busy        idle   peak in flight",
    ]
    lines += [
        f"{rank:>4}  {f.busy:>10.6g}  {f.idle:>10.6g}   {f.peak_in_flight:>14}"
        for rank, f in enumerate(figures.per_rank)
    ]
    lines += [
        "",
        f"makespan         {figures.makespan:.6g}",
        f"bubble fraction  {figures.bubble_fraction:.4f}   (idle over ranks x makespan)",
        f"bubble rate      {figures.bubble_rate:.4f}   (of the largest rank cost, {figures.bubble_cost:.6g})",
        f"activations      {chosen.peak:<6.4g}   (the most a rank keeps, from F to W, each of its whole slice)",
        f"transfers        {chosen.transfers:<6}   (messages between ranks in a step)",
    ]
    return "\n".join(lines + (_asynchronous(long) if long is not None else []))


def _asynchronous(long: LongRun) -> list[str]:
    """What a run that goes on looks like: the figures above are those of a window between two drains."""
    return [
        "",
        "asynchronous: weights are updated while micro-batches are in flight; this is not the synchronous optimisation",
        f"steady state     bubble {long.steady.bubble:.4f}, {long.steady.period:.6g} per micro-batch",
        f"staleness        {_spaced(long.staleness)}   (updates, by stage)",
        f"versions kept    {_spaced(long.versions)}   (of the weights, by rank)",
    ]


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
