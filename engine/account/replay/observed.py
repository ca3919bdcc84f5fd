"""What one measured step took, action by action, in the order of the program: what a replay is fed with.

All times are integer nanoseconds. R replicas, W world ranks, n computations of a replica, S stages. A step is observed
only where every rank ran just its row of the program: a short last batch, which runs another program, is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.account.messages import MESSAGE_WAITS, inside, journeys
from engine.plan.actions import Program, unpack
from engine.plan.timeline import COMPUTE_KINDS, Kind, Timeline

Ints = npt.NDArray[np.int64]

_WAITED = {int(Kind.F): int(Kind.WAIT_F), int(Kind.B): int(Kind.WAIT_B), int(Kind.I): int(Kind.WAIT_B)}


@dataclass(frozen=True, eq=False)
class Observed:
    """What was observed of a step, in nanoseconds. R: replicas, n: computations, W: world, S: stages.

    `duration`, `delay` [R, n]: computations rank after rank, each rank's in its order; `delay` is what the message that
    one needs was under way. `loaded` [W, 2]: waiting for data at the step's beginning, and within the rank's first wait
    for a message. What ranks do together counts from when the last of them has begun it: `reduce` [S] of a stage's
    gradients, `gather` [S] of its parameters, `count` of what was counted, `norm` [R] of the gradients' norm. `step`
    [W]: the optimizer. `time`: from when the last rank had ended the step before to when the last one has ended this
    one.
    """

    duration: Ints
    delay: Ints
    loaded: Ints
    reduce: Ints
    gather: Ints
    count: int
    norm: Ints
    step: Ints
    time: int


def observe(timeline: Timeline, program: Program, passes: int = 1) -> Observed | None:
    """Observe a measured step of `program`, compute-only; None where the ranks did not run just that.

    A step of several passes counts its micro-batches anew in each; `program` counts them on.
    """
    order = _order(timeline, program, passes)
    if order is None:
        return None
    replicas = timeline.ranks // program.ranks
    return Observed(
        duration=durations(timeline)[order].reshape(replicas, -1),
        delay=_delays(timeline, program.ranks, order).reshape(replicas, -1),
        loaded=_loaded(timeline),
        reduce=_reductions(timeline, program.stages),
        gather=_together(timeline, Kind.GATHER, timeline.stage, program.stages),
        count=_counting(timeline),
        norm=_together(timeline, Kind.WAIT_NORM, timeline.rank // program.ranks, replicas),
        step=_summed(timeline, Kind.STEP),
        time=int(timeline.windows[:, 1].max() - timeline.windows[:, 0].max()),
    )


def durations(timeline: Timeline) -> npt.NDArray[np.int64]:
    """What each span took of its rank's time: [n]. Of a pair done together the first is left what the second was not.

    So the two add up to the time of the pair, as in a simulation, where one comes after the other.
    """
    start, end = timeline.start, timeline.end
    taken: npt.NDArray[np.int64] = end - start
    first, second = timeline.pairs.T
    whole = np.maximum(end[first], end[second]) - np.minimum(start[first], start[second])
    taken[first] = np.where(start[second] < end[first], whole - taken[second], taken[first])
    return taken


def _order(timeline: Timeline, program: Program, passes: int) -> Ints | None:
    """The computations' spans in the order of the program: [R x n]; None where they are not the program's."""
    rows = []
    for rank in range(timeline.ranks):
        found = np.flatnonzero((timeline.rank == rank) & np.isin(timeline.kind, COMPUTE_KINDS))
        found = found[np.argsort(timeline.start[found], kind="stable")]
        op, stage, microbatch, _ = unpack(program.rows[rank % program.ranks])
        wanted = np.stack([op, stage, microbatch % (program.microbatches // passes)])
        here = np.stack([timeline.kind[found], timeline.stage[found], timeline.microbatch[found]])
        if here.shape != wanted.shape or (here != wanted).any():
            return None
        rows.append(found)
    return np.concatenate(rows)


def _delays(timeline: Timeline, ranks: int, order: Ints) -> Ints:
    """[R x n]: what the message before each computation was under way; 0 where it needs none."""
    columns = (timeline.rank, timeline.kind, timeline.stage, timeline.microbatch)
    rank, kind, stage, microbatch = (column.tolist() for column in columns)
    users: dict[tuple[int, int, int, int], list[int]] = {}
    for place, at in enumerate(order.tolist()):
        if kind[at] in _WAITED:
            users.setdefault((rank[at], _WAITED[kind[at]], stage[at], microbatch[at]), []).append(place)
    found = journeys(timeline, ranks)
    delay = np.zeros(len(order), dtype=np.int64)
    for at, lasted in zip(found.wait.tolist(), found.delay.tolist(), strict=True):
        waiting = users.get((rank[at], kind[at], stage[at], microbatch[at]))
        if waiting:  # the k-th wait is the k-th user's
            delay[waiting.pop(0)] = lasted
    return delay


def _loaded(timeline: Timeline) -> Ints:
    """[W, 2]: loads outside of a wait for a message, and within one."""
    loads = np.flatnonzero(timeline.kind == Kind.WAIT_DATA)
    waits = np.flatnonzero(np.isin(timeline.kind, MESSAGE_WAITS))
    within = np.isin(loads, inside(timeline.rank, timeline.start, timeline.end, loads, waits)[0]).astype(np.int64)
    table = np.zeros((timeline.ranks, 2), dtype=np.int64)
    np.add.at(table, (timeline.rank[loads], within), (timeline.end - timeline.start)[loads])
    return table


def _reductions(timeline: Timeline, stages: int) -> Ints:
    """[stages]: from when a stage was complete on all its ranks, and its reduction begun, to the end of that.

    A stage may be reduced in several buckets, the first of them before its last backward has ended.
    """
    lasted = np.zeros(stages, dtype=np.int64)
    for stage in np.unique(timeline.stage[timeline.kind == Kind.REDUCE]).tolist():
        reduced = (timeline.stage == stage) & (timeline.kind == Kind.REDUCE)
        complete = (timeline.stage == stage) & np.isin(timeline.kind, (Kind.B, Kind.W))
        begun = []
        for rank in np.unique(timeline.rank[reduced]):
            here = timeline.rank == rank
            first = int(timeline.start[reduced & here].min())
            begun.append(max(first, int(timeline.end[complete & here].max(initial=first))))
        lasted[stage] = max(0, int(timeline.end[reduced].max()) - max(begun))
    return lasted


def _together(timeline: Timeline, kind: Kind, group: npt.NDArray[np.int32], groups: int) -> Ints:
    """[groups]: from when the last member of a group had begun to when the last one had ended."""
    here = np.flatnonzero(timeline.kind == kind)
    begun, ended = (np.full(groups, np.iinfo(np.int64).min) for _ in range(2))
    np.maximum.at(begun, group[here], timeline.start[here])
    np.maximum.at(ended, group[here], timeline.end[here])
    lasted: Ints = np.maximum(0, ended - begun)
    return lasted


def _counting(timeline: Timeline) -> int:
    """The longest wait for the counts of others after every rank had begun the step."""
    here = np.flatnonzero(timeline.kind == Kind.WAIT_COUNT)
    begun = np.maximum(timeline.start[here], timeline.windows[:, 0].max())
    return int((timeline.end[here] - begun).max(initial=0))


def _summed(timeline: Timeline, kind: Kind) -> Ints:
    here = timeline.kind == kind
    total = np.zeros(timeline.ranks, dtype=np.int64)
    np.add.at(total, timeline.rank[here], (timeline.end - timeline.start)[here])
    return total
