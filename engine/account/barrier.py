"""What synchronous replicas waste at their barrier: the time that each waits because another is slower.

    replica 0   | compute | waste              | reduce | compute ...      a stage's last backward is there, but the
    replica 1   | compute                      | reduce | compute ...      other replicas' is not yet

The account's `reduce` is both together. Here it is cut where the last of the other replicas was ready: what lies before
is waiting for it, what lies after is the reduction that nothing hid. Ready is a replica whose last backward of the
stage has ended; for what is awaited at the beginning of a step (counts, updated shards), one that has begun the step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.job import Job
from engine.plan.timeline import COMPUTE_KINDS, Kind, Timeline
from engine.ranks import Rank

Ints = npt.NDArray[np.int64]

_WAITS = (Kind.WAIT_REDUCE, Kind.WAIT_GATHER, Kind.WAIT_COUNT)
_COMPLETE = (Kind.B, Kind.W)  # with the last of these the gradients of a stage are there


def barrier(timeline: Timeline, ranks: int) -> Ints:
    """[W, 2] nanoseconds of a measured step: waiting for slower replicas, and for the reduction itself.

    `ranks` is P; the timeline holds the ranks of all replicas.
    """
    found = np.zeros((timeline.ranks, 2), dtype=np.int64)
    (_, replica, pipeline), begun = Rank.of(timeline.rank, ranks), timeline.windows[:, 0].astype(np.int64)
    holding = np.isin(timeline.kind, (*COMPUTE_KINDS, Kind.REDUCE, Kind.GATHER))
    for at in np.flatnonzero(np.isin(timeline.kind, _WAITS)).tolist():
        rank, stage = int(timeline.rank[at]), timeline.stage[at]
        same = timeline.stage == stage if stage >= 0 else pipeline == pipeline[at]
        complete = same & np.isin(timeline.kind, _COMPLETE)
        others = same & holding & (replica != replica[at])
        ready = begun[timeline.rank[others]].max(initial=np.iinfo(np.int64).min)
        if timeline.kind[at] == Kind.WAIT_REDUCE:
            ready = max(ready, timeline.end[complete & others].max(initial=ready))
        start, end = max(int(timeline.start[at]), int(begun[rank])), int(timeline.end[at])
        cut = min(max(start, int(ready)), end)
        found[rank] += max(0, cut - start), max(0, end - max(cut, start))
    return found


class Barrier:
    """Running sums over traced steps. The first, which warms up, counts only as long as it is the only one."""

    def __init__(self, job: Job) -> None:
        self._shape, self._ranks = (job.replicas, job.ranks, 2), job.ranks
        self._total, self._window = np.zeros((job.world, 2), dtype=np.int64), np.zeros(job.world, dtype=np.int64)
        self._added = 0

    def add(self, timeline: Timeline) -> list[float]:
        """Take in one traced step; the seconds that each replica waited in it: [R]."""
        found = barrier(timeline, self._ranks)
        if self._added == 1:
            self._total[:], self._window[:] = 0, 0
        self._added += 1
        self._total += found
        self._window += timeline.windows[:, 1] - timeline.windows[:, 0]
        return [float(seconds) for seconds in self._by_replica(found)[:, 0] * 1e-9]

    def result(self) -> list[dict[str, float]]:
        """Per replica, means over steps and over its ranks, in seconds: `waiting`, its `share` of the step, `reducing`.

        Empty where no step was traced.
        """
        if not self._added:
            return []
        steps = max(1, self._added - 1)
        waiting, reducing = (self._by_replica(self._total) * 1e-9 / steps).T.tolist()
        window = (self._window.reshape(self._shape[:2]).mean(axis=1) * 1e-9 / steps).tolist()
        rows = zip(waiting, window, reducing, strict=True)
        return [{"waiting": w, "share": w / step if step else 0.0, "reducing": r} for w, step, r in rows]

    def _by_replica(self, table: Ints) -> npt.NDArray[np.float64]:
        mean: npt.NDArray[np.float64] = table.reshape(self._shape).mean(axis=1)
        return mean
