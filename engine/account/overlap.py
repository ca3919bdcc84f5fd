"""How much of the replicas' reduction the computation hid, of what it could have hidden.

    last gradient there   the reduction begins everywhere      it ends       the step's last computation ends
            │                        │                            │                       │
            └──────── QUEUED ────────┴────────── REDUCE ──────────┘                       │
                                     └──────────── hidden, all of it ─────────────────────┤ exposed

A bucket's reduction counts from when the last of its members has begun it: what a rank waits for a slower replica is no
reduction. It is hidden for as long as some rank still computes in this step, for the step cannot end before: under a
pipeline the cool-down counts.

What could be hidden is what a rank would have got done by then had it reduced whenever there was something to reduce: a
bucket is there once its last gradient is, on all of its members. The amount does not depend on the order of the
buckets, so it is a bound for every order, and what was hidden is never more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.plan.timeline import COMPUTE_KINDS, Kind, Timeline

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Overlap:
    """Reduction and computation at the same time, summed over `steps`: nanoseconds by world rank [W].

    hidden <= hideable <= total; total - hidden is exposed, total - hideable no overlap would have hidden.
    """

    total: Ints
    hideable: Ints
    hidden: Ints
    steps: int = 1

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(
            self.total + other.total,
            self.hideable + other.hideable,
            self.hidden + other.hidden,
            self.steps + other.steps,
        )

    @property
    def share(self) -> float | None:
        """Hidden of what could be hidden, over all ranks; None where nothing could."""
        return share(int(self.hidden.sum()), int(self.hideable.sum()))

    @property
    def shares(self) -> list[float | None]:
        """Hidden of what could be hidden, by rank; None where nothing could."""
        return [share(*each) for each in zip(self.hidden.tolist(), self.hideable.tolist(), strict=True)]


def share(part: int, whole: int) -> float | None:
    """A part of a whole as a fraction; None where there is no whole."""
    return part / whole if whole else None


def overlap(timeline: Timeline) -> Overlap:
    """The overlap of one measured step, with the spans of all ranks. Without reductions all is 0.

    A step that lacks QUEUED spans is taken as one in which no bucket ever waited for its turn.
    """
    computing = np.isin(timeline.kind, COMPUTE_KINDS)
    horizon = int(timeline.end[computing].max(initial=timeline.windows.min(initial=0)))
    reduced, group = _buckets(timeline, Kind.REDUCE)
    queued, waiting = _buckets(timeline, Kind.QUEUED)
    begun, ready = (np.full(int(group.max(initial=-1)) + 1, np.iinfo(np.int64).min) for _ in range(2))
    np.maximum.at(begun, group, timeline.start[reduced])
    if len(queued) == len(reduced):
        np.maximum.at(ready, waiting, timeline.start[queued])
    else:
        ready = begun
    end = timeline.end[reduced]
    start = np.minimum(begun[group], end)
    rank = timeline.rank[reduced]
    total, hideable, hidden = (np.zeros(timeline.ranks, dtype=np.int64) for _ in range(3))
    np.add.at(total, rank, end - start)
    np.add.at(hidden, rank, np.maximum(0, np.minimum(end, horizon) - start))
    for each in np.unique(rank).tolist():
        here = rank == each
        hideable[each] = _done(ready[group][here].tolist(), (end - start)[here].tolist(), horizon)
    return Overlap(total, hideable, hidden)


def _buckets(timeline: Timeline, kind: Kind) -> tuple[Ints, Ints]:
    """The spans of a kind, and for each the number of its bucket, the same on all members.

    On every rank that holds a stage the k-th is the k-th bucket of the stage: they start in one order.
    """
    found = np.flatnonzero(timeline.kind == kind)
    found = found[np.lexsort((found, timeline.stage[found], timeline.rank[found]))]
    place = timeline.rank[found].astype(np.int64) * (int(timeline.stage.max(initial=0)) + 1) + timeline.stage[found]
    _, first, counts = np.unique(place, return_index=True, return_counts=True)
    ordinal = np.arange(len(found)) - np.repeat(first, counts)
    return found, timeline.stage[found] * (int(ordinal.max(initial=0)) + 1) + ordinal


def _done(ready: Sequence[int], lasts: Sequence[int], horizon: int) -> int:
    """The work done by the horizon, if something is done whenever there is something to do."""
    done, free = 0, np.iinfo(np.int64).min
    for moment, length in sorted(zip(ready, lasts, strict=True)):
        start = max(free, moment)
        free = start + length
        done += max(0, min(free, horizon) - start)
    return done
