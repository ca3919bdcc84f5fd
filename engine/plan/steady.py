"""The steady state of an asynchronous schedule: what a micro-batch costs in the middle of a long run.

An asynchronous pipeline fills once and drains once, however long it runs. Its figures are those of what lies between:
the first and the last P micro-batches are left out, so that the rest is the same on every rank and goes on for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.plan.actions import Op, Program
from engine.plan.schedules import SCHEDULES, Stream
from engine.plan.simulate import Costs, simulate
from engine.plan.timeline import COMPUTE_KINDS, Timeline
from engine.plan.updates import peak_versions, staleness


@dataclass(frozen=True)
class SteadyState:
    """The middle of a long run.

    `bubble`: the mean over ranks of the time not spent computing. `period`: time per micro-batch, of the costs.
    """

    bubble: float
    period: float


@dataclass(frozen=True)
class LongRun:
    """An asynchronous schedule in a run that goes on.

    Its steady state, the largest `staleness` of each stage in updates, and the most `versions` of the weights that each
    rank keeps.
    """

    steady: SteadyState
    staleness: list[int]
    versions: list[int]


def long_run(name: str, ranks: int, microbatches: int, costs: Mapping[str, Any], options: Mapping[str, Any]) -> LongRun:
    """Return the long run of the asynchronous schedule `name`.

    `costs` as `plan.costs`, `options` of the schedule.
    """
    long = steady_program(name, ranks, options)
    timeline = simulate(long, Costs.from_settings(costs, long.placement, long.microbatches))
    each = SCHEDULES[name].per_update(microbatches)
    updates = _stream(name).build(ranks, [each] * (2 + -(-2 * ranks // each)), **options)
    oldest = staleness(updates).max(axis=1).tolist()
    return LongRun(steady_state(long, timeline), oldest, peak_versions(updates))


def steady_program(name: str, ranks: int, options: Mapping[str, Any]) -> Program:
    """Build a program of an asynchronous schedule that is long enough for `steady_state`: 3P micro-batches."""
    return _stream(name).build(ranks, [1] * (3 * ranks), **options)


def steady_state(program: Program, timeline: Timeline) -> SteadyState:
    """Measure the steady state of a simulated asynchronous program with more than 2P micro-batches.

    On each rank from the end of the backward of micro-batch P-1 to that of micro-batch M-P-1.
    """
    ranks, counted = program.ranks, program.microbatches - 2 * program.ranks
    assert counted > 0, "a program of more than 2P micro-batches"
    begin, finish = (_ends(timeline, microbatch) for microbatch in (ranks - 1, ranks - 1 + counted))
    compute = np.isin(timeline.kind, COMPUTE_KINDS)
    rank = timeline.rank[compute]
    inside = np.minimum(timeline.end[compute], finish[rank]) - np.maximum(timeline.start[compute], begin[rank])
    busy = np.bincount(rank, weights=np.maximum(inside, 0.0), minlength=ranks)
    window = finish - begin
    idle = np.divide(window - busy, window, out=np.zeros(ranks), where=window > 0)
    return SteadyState(float(idle.mean()), float(window.mean()) / counted)


def _stream(name: str) -> Stream:
    stream = SCHEDULES[name].stream
    assert stream is not None, f"{name} is synchronous"
    return stream


def _ends(timeline: Timeline, microbatch: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """When each rank ends its last backward of a micro-batch: shape [P]."""
    ends = np.zeros(timeline.ranks)
    here = np.isin(timeline.kind, (Op.B, Op.W)) & (timeline.microbatch == microbatch)
    np.maximum.at(ends, timeline.rank[here], timeline.end[here])
    return ends
