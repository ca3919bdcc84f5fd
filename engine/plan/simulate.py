"""What a program would take: a program and the cost of its actions give a Timeline, and a Timeline its figures.

Every action starts as early as the action before it in its row and the message it waits for allow. A message costs its
receiver time, not its sender: it arrives `transfer` after the action that made it. Nothing overlaps within a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.plan.actions import COMPUTE, Op, Placement, Program, Row
from engine.plan.dependencies import Flat, dependencies, progress
from engine.plan.timeline import Timeline
from engine.plan.verify import peak_in_flight

Floats = npt.NDArray[np.float64]

MOST_COST = 1e15  # sums stay exact enough to tell actions apart
COST_DEFAULTS = {"forward": 1.0, "input_backward": 1.0, "weight_backward": 1.0, "transfer": 0.0}


@dataclass(frozen=True, eq=False)
class Costs:
    """Durations of actions and transfers, in any unit.

    `duration`: broadcastable to [4, S, M], the first axis in the order F, B, I, W.
    `transfer`: [S]; a message between stages s and s+1, either way, takes transfer[s] if they are on different ranks.
    """

    duration: Floats
    transfer: Floats

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], placement: Placement, microbatches: int) -> Costs:
        """From `plan.costs`: forward, input_backward, weight_backward, transfer, each a number or a list of numbers.

        Costs are those of a stage of an unchunked pipeline: with v stages per rank a stage takes 1/v of it. A list has
        S numbers, one per stage; or P, one per stage of the unchunked pipeline, whatever v: each stands for the v
        stages it is cut into. A full backward takes both halves. Raises ValueError for unknown keys, wrong lengths,
        negative values and what is no number.
        """
        if unknown := sorted(set(settings) - set(COST_DEFAULTS)):
            raise ValueError(
                f"plan.costs has no key {', '.join(map(repr, unknown))}; its keys: {', '.join(COST_DEFAULTS)}"
            )
        stages = placement.stages
        chunks = max(1, stages // placement.ranks)
        values = {
            key: _numbers(key, settings.get(key, default), stages, placement.ranks)
            for key, default in COST_DEFAULTS.items()
        }
        forward, half, weight = (values[k] / chunks for k in ("forward", "input_backward", "weight_backward"))
        each = np.stack([forward, half + weight, half, weight])[:, :, None]
        return cls(np.broadcast_to(each, (len(COMPUTE), stages, microbatches)), values["transfer"])


def _numbers(key: str, value: Any, stages: int, ranks: int) -> Floats:
    """A number for all stages, one for each, or one for each of `ranks` equal shares of them: shape [S]."""
    many = isinstance(value, Sequence) and not isinstance(value, str)
    numbers = list(value) if many else [value] * stages
    possible = {stages} if stages % ranks else {ranks, stages}
    if len(numbers) not in possible:
        given = f"plan.costs.{key} lists {len(numbers)} numbers for {stages} stages on {ranks} ranks"
        raise ValueError(f"{given}; give {' or '.join(map(str, sorted(possible)))}, or a single number for all")
    for number in numbers:
        real = isinstance(number, (int, float, np.integer, np.floating)) and not isinstance(number, bool)
        if not real or not 0 <= number <= MOST_COST:
            raise ValueError(
                f"plan.costs.{key}={value!r}: {number!r} is not a number of 0 or more, at most {MOST_COST:.0e}"
            )
    return np.repeat(np.array(numbers, dtype=np.float64), stages // len(numbers))


def compute_only(program: Program) -> Program:
    """Return the same program without communication, reductions and steps."""
    return replace(program, rows=tuple(row[(row >> 56) <= Op.W] for row in program.rows), versions=None)


def simulate(program: Program, costs: Costs) -> Timeline:
    """Return the timeline of a verified program: one float64 span per computation.

    Communication that it lists is ignored. Raises ValueError where the program cannot run to its end.
    """
    flat = Flat(compute_only(program))
    waits = dependencies(flat)
    if (waits.own > np.arange(len(flat))).any():
        raise ValueError(
            f"program {program.name} cannot run: an action comes before what it needs; verify() says which"
        )
    shape = (len(COMPUTE), program.stages, program.microbatches)
    duration = np.broadcast_to(costs.duration, shape)[flat.op, flat.stage, flat.microbatch].astype(np.float64)
    done = progress(flat.offsets, waits.neighbour, duration, _delays(flat, waits.neighbour, costs.transfer))
    if (done.heads < flat.offsets[1:]).any():
        raise ValueError(f"program {program.name} cannot run to its end; verify() says why")
    makespan = float(done.end.max(initial=0.0))
    columns = (flat.rank, flat.op, flat.stage, flat.microbatch)
    rank, kind, stage, microbatch = (column.astype(np.int32) for column in columns)
    windows = np.tile(np.array([0.0, makespan]), (program.ranks, 1))
    first = np.flatnonzero(flat.fused)
    pairs = np.stack([first, first + 1], axis=1)
    return Timeline(rank, kind, stage, microbatch, done.start, done.end, windows, pairs)


def _delays(flat: Flat, neighbour: Row, transfer: Floats) -> Floats:
    """What each action's message takes on its way: the edge's transfer where it crosses ranks, else 0."""
    edge = np.where(flat.op == Op.F, flat.stage - 1, flat.stage)
    crossing = (neighbour >= 0) & (flat.rank != flat.rank[neighbour])
    delays: Floats = np.where(crossing, np.asarray(transfer, dtype=np.float64)[edge], 0.0)
    return delays


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank; `busy` + `idle` = makespan.

    `cost`: from the start of the rank's first action to the end of its last.
    """

    busy: float
    idle: float
    cost: float
    peak_in_flight: int


@dataclass(frozen=True)
class Figures:
    """The figures of a timeline, in the unit of its costs.

    `bubble_fraction`: 1 - busy time over (ranks x makespan). `bubble_cost`: the largest rank cost.
    `bubble_rate`: (largest cost - largest busy time) / largest cost, as in the zero-bubble papers (arXiv 2401.10241).
    """

    bubble_fraction: float
    bubble_rate: float
    bubble_cost: float
    makespan: float
    per_rank: tuple[RankFigures, ...]


def figures(program: Program, timeline: Timeline) -> Figures:
    """Return bubble, makespan and peaks of a simulated program."""
    ranks = program.ranks
    lasts = timeline.end - timeline.start
    busy = np.bincount(timeline.rank, weights=lasts, minlength=ranks)
    first, last = np.full(ranks, np.inf), np.full(ranks, -np.inf)
    np.minimum.at(first, timeline.rank, timeline.start)
    np.maximum.at(last, timeline.rank, timeline.end)
    cost = np.where(np.isfinite(first), last - first, 0.0)
    makespan, largest = float(last.max(initial=0.0)), float(cost.max(initial=0.0))
    peaks = peak_in_flight(program)
    return Figures(
        bubble_fraction=1 - float(busy.sum()) / (ranks * makespan) if makespan else 0.0,
        bubble_rate=1 - float(busy.max()) / largest if largest else 0.0,
        bubble_cost=largest,
        makespan=makespan,
        per_rank=tuple(
            RankFigures(float(b), makespan - float(b), float(c), p) for b, c, p in zip(busy, cost, peaks, strict=True)
        ),
    )
