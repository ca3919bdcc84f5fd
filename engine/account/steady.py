"""The bubbles of an asynchronous run: of its steady state, the first and the last P updates of each window left out.

A step of the account is one update, from the end of a stage's STEP to the end of its next one. The pipeline goes on
meanwhile: waiting at the beginning of an update is not filling the pipeline, but for the first of a window; and what a
rank waits for may have been sent in the update before, so that one's messages are looked at as well, where it was
traced.

    ideal, predicted    simulated as in `measure`, over the middle of a long program (plan/steady.py)
    explained           a whole window simulated, each computation as long as it was, messages as long as on average
    measured            mean over the steady updates; over all of them where no window has any
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.account.bubble import Account, account
from engine.account.measure import Bubbles, Floats, Sums
from engine.account.observed import Observed, durations
from engine.account.overlap import Overlap
from engine.account.waterfall import Waterfall
from engine.job import Job
from engine.plan.actions import COMPUTE, Op
from engine.plan.schedules import SCHEDULES
from engine.plan.simulate import Costs, simulate
from engine.plan.steady import SteadyState, steady_program, steady_state
from engine.plan.timeline import COMPUTE_KINDS, Kind, Timeline
from engine.ranks import replica_ranks

MOST_UPDATES = 1000  # of a window that is simulated as a whole
_CONTEXT = (Kind.SEND_F, Kind.SEND_B)  # what of the update before is looked at


class SteadyMeasure:
    """As `measure.Measure`, for asynchronous schedules: it is given one traced update after the other."""

    def __init__(self, job: Job) -> None:
        self._job, self._stages = job, job.placement.stages
        self.program = steady_program(job.compute.name, job.ranks, job.settings.schedule_options)
        self._ends = np.cumsum(job.windows)
        self._every, self._steady = (Sums.zero(job.world, self._stages, 1) for _ in range(2))
        self._before = -1  # the last update that was added
        self._recent: deque[Timeline] = deque(maxlen=2 * job.ranks + 1)
        self._window: list[Timeline] = []  # the present window, while every update of it was traced
        self._explained: float | None = None
        self.waterfall: Waterfall | None = None  # it is one of whole steps
        self.overlap: Overlap | None = None  # so is this
        self.observed: Observed | None = None  # and so is this
        self.shown: Timeline | None = None  # the update that was added last
        self.last: Timeline | None = None  # the last updates of a window, as one timeline
        self.last_whole: Timeline | None = None

    def add(self, timeline: Timeline, step: int) -> Account:
        """Take in one traced update, the spans of all ranks; `step` counts through the run."""
        window = int(np.searchsorted(self._ends, step, side="right"))
        length = self._job.windows[window]
        position = step - int(self._ends[window]) + length
        if step != self._before + 1 or position == 0:
            self._recent.clear()
        found = account(_after(self._recent, timeline), self._job.ranks, self._stages, running=position > 0)
        steady = self._job.ranks <= position < length - self._job.ranks
        for sums in (self._every, self._steady) if steady else (self._every,):
            sums.take(found)
            _add_costs(sums, timeline)
        self._keep(timeline, position, length)
        self._recent.append(timeline)
        self._before, self.shown = step, timeline
        self.last = self.last_whole = joined(self._recent)
        return found

    def result(self) -> Bubbles | None:
        """None where no update was traced."""
        sums, updates = self._steady if self._steady.steps else self._every, self._job.microbatches
        if not sums.steps:
            return None
        means = sums.means()
        costs, equal = sums.costs()
        free, latency = np.zeros(self._stages), means[2]
        (ideal, _), (predicted, simulated) = self._simulate(equal, free), self._simulate(costs, free)
        return Bubbles(
            sums.steps, *means, costs, ideal.bubble, predicted.bubble,
            ideal.period * updates, predicted.period * updates, simulated,
            with_transfer=self._simulate(costs, latency)[0].bubble, explained=self._explained,
            steady=sums is self._steady,
        )  # fmt: skip

    def _keep(self, timeline: Timeline, position: int, length: int) -> None:
        """The update at `position` of a window of `length`; what the last one completes is simulated."""
        if position == len(self._window) and 2 * self._job.ranks < length <= MOST_UPDATES:
            self._window.append(timeline)
        else:
            self._window = []
        if len(self._window) == length:
            self._explained = self._explain(self._window)
            self._window = []

    def _explain(self, window: Sequence[Timeline]) -> float | None:
        """The bubble of the middle of a window, the mean over replicas, each computation as long as it was.

        None where the spans are not those of a whole window.
        """
        job, stream = self._job, SCHEDULES[self._job.compute.name].stream
        assert stream is not None
        latency = self._every.means()[2]
        bubbles = []
        for replica in range(job.replicas):
            own = [_computations(each, np.array(replica_ranks(replica, job.ranks))) for each in window]
            updates = [int(((kind == Kind.B) & (stage == 0)).sum()) for kind, stage, _, _ in own]
            program = stream.build(job.ranks, updates, **job.settings.schedule_options)
            kind, stage, microbatch, seconds = map(np.concatenate, zip(*own, strict=True))
            if microbatch.max(initial=0) >= program.microbatches:
                return None
            costs = np.full((len(COMPUTE), self._stages, program.microbatches), np.nan)
            costs[kind, stage, microbatch] = seconds
            if np.isnan(costs[[Op.F, Op.B]]).any():
                return None
            bubbles.append(steady_state(program, simulate(program, Costs(costs, latency))).bubble)
        return float(np.mean(bubbles))

    def _simulate(self, costs: Floats, transfer: Floats) -> tuple[SteadyState, Timeline]:
        shape = (len(COMPUTE), self._stages, self.program.microbatches)
        timeline = simulate(self.program, Costs(np.broadcast_to(costs, shape), transfer))
        return steady_state(self.program, timeline), timeline


def _add_costs(sums: Sums, timeline: Timeline) -> None:
    compute = np.isin(timeline.kind, COMPUTE_KINDS)
    place = (timeline.kind[compute], timeline.stage[compute], np.zeros(int(compute.sum()), dtype=np.int64))
    np.add.at(sums.count, place, 1)
    np.add.at(sums.duration, place, durations(timeline)[compute])


def _computations(
    timeline: Timeline, ranks: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.floating[Any]]]:
    """Kind, stage, micro-batch and seconds of the computations of some ranks."""
    chosen = np.isin(timeline.kind, COMPUTE_KINDS) & np.isin(timeline.rank, ranks)
    return (
        timeline.kind[chosen],
        timeline.stage[chosen],
        timeline.microbatch[chosen],
        durations(timeline)[chosen] * 1e-9,
    )


def joined(timelines: Sequence[Timeline]) -> Timeline:
    """Consecutive updates as one timeline, from the beginning of the first to the end of the last."""
    windows = np.stack([timelines[0].windows[:, 0], timelines[-1].windows[:, 1]], axis=1)
    return _merged(timelines, windows)


def _after(recent: Sequence[Timeline], timeline: Timeline) -> Timeline:
    """The update with those spans of the one before that it may depend on; its own windows."""
    if not recent:
        return timeline
    before = recent[-1]
    kept = np.isin(before.kind, _CONTEXT)
    columns = (before.rank, before.kind, before.stage, before.microbatch, before.start, before.end)
    rank, kind, stage, microbatch, start, end = (column[kept] for column in columns)
    earlier = Timeline(rank, kind, stage, microbatch, start, end, before.windows)
    return _merged([earlier, timeline], timeline.windows)


def _merged(timelines: Sequence[Timeline], windows: npt.NDArray[np.int64]) -> Timeline:
    """The spans of all; overlapped pairs do not occur in asynchronous programs."""
    return Timeline(
        np.concatenate([t.rank for t in timelines]),
        np.concatenate([t.kind for t in timelines]),
        np.concatenate([t.stage for t in timelines]),
        np.concatenate([t.microbatch for t in timelines]),
        np.concatenate([t.start for t in timelines]),
        np.concatenate([t.end for t in timelines]),
        windows,
    )
