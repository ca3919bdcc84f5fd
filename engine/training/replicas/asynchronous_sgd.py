"""Asynchronous replicas: each pushes its gradients to a server of each stage, and goes on with what comes back.

    data_parallel.mode=sync     replicas sum their gradients: one update per step, of the whole global batch
    data_parallel.mode=async    each push is an update: R per step, each of one replica's share of the global batch

A gradient is divided by what the replica's own share counts, so the learning rate means what it means for one process
with a batch of that size. R pushes move the weights about as far as R synchronous updates would: to compare, divide it
by R. An optimizer's state knows pushes: momentum and decay act R times per step. A scheduler advances with every R-th
push, and so gets as far as in a synchronous run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.gradients.buckets import Reducer
from engine.gradients.division import DIVISIONS
from engine.gradients.servers.pushes import PushReducer
from engine.job import Job
from engine.pipeline.updates.norms import Update
from engine.pipeline.updates.updater import Updater
from engine.plan.actions import Program
from engine.settings import Settings
from engine.telemetry.position import Place, locate
from engine.telemetry.records import PUSH_COLUMNS
from engine.training.async_window import window_lengths
from engine.training.build import build_optimizer

BEATS = 4  # times per time limit that a server says it holds somebody back


def check_asynchronous_sgd(settings: Settings, program: Program) -> None:
    """ValueError where replicas cannot do without each other, or a bound has nothing to bound."""
    chosen, server = settings.data_parallel, settings.allreduce.name
    if not chosen.asynchronous:
        if chosen.max_staleness is not None:
            raise ValueError(
                f"data_parallel.max_staleness={chosen.max_staleness} bounds asynchronous replicas, but "
                "data_parallel.mode=sync: set data_parallel.mode=async, or leave it null"
            )
        return
    if chosen.replicas == 1:
        raise ValueError(
            "data_parallel.mode=async with data_parallel.replicas=1: there is no other replica to be independent of; "
            "use 2 replicas or more, or data_parallel.mode=sync"
        )
    if settings.shard_optimizer or server not in DIVISIONS:
        given = "shard_optimizer=true" if settings.shard_optimizer else f"allreduce={server}"
        raise ValueError(
            f"data_parallel.mode=async needs a server to push gradients to, and {given} sums them over replicas "
            f"instead: set shard_optimizer=false and allreduce={' or allreduce='.join(DIVISIONS)}"
        )
    if program.asynchronous:
        raise ValueError(
            f"data_parallel.mode=async needs whole weights at every pull, and schedule={program.name} keeps several "
            "versions of them: use a synchronous schedule, or data_parallel.mode=sync"
        )
    if program.placement.copies > 1:
        raise ValueError(
            f"schedule={program.name} keeps two copies of each stage, whose gradients must be summed before an update; "
            "with data_parallel.mode=async use a schedule that keeps one, or use data_parallel.mode=sync"
        )
    if settings.device == "cuda":
        raise ValueError(
            "data_parallel.mode=async is possible between CPUs only (device=cuda is chosen, or was by device=auto): "
            "set device=cpu, or data_parallel.mode=sync"
        )


class PushUpdater(Updater):
    """The end of a step where replicas are asynchronous: gradients are clipped and pushed, and a server updates.

    Clipped gradients leave at STEP only.
    """

    def __init__(self, *arguments: Any, job: Job, **keywords: Any) -> None:
        self._bound, self._beat_s = job.settings.data_parallel.max_staleness, job.settings.timeout_s / BEATS
        super().__init__(*arguments, **keywords)

    def _reducer(self, stage: int) -> Reducer:
        """What pushes the gradients of a stage, and serves them where this rank is a server of it."""
        group, division = self._communicators.sharing[stage], self.rules.division
        assert division is not None, "checked before the start"
        rest = self.rules.bucket_bytes, self._thread, self._order, division, self._bound, self._beat_s
        return PushReducer(self.stages[stage].named_parameters(), group, *rest)

    @property
    def _kept_back(self) -> bool:
        return self.update.clip_norm is not None

    def closing(self, stage: int, waiting: Collection[Tensor] | None) -> None:
        """A bucket is pushed as soon as its gradients are there, unless they are to be clipped."""
        if not self._kept_back:
            super().closing(stage, waiting)

    def reduce(self, stage: int) -> None:
        """REDUCE: push what is left, unless it is to be clipped."""
        if not self._kept_back:
            super().reduce(stage)

    def step(self, microbatch: int) -> None:
        """STEP: clip, and wait until the pushes are applied and the weights for the next step are there."""
        self._apply(microbatch)
        if self._kept_back:
            for reducer in self.reducers.values():
                reducer.launch()
        self._observer.waiting()
        self.await_reductions()
        self._observer.after_update()


class AsynchronousSGD:
    """What one rank does for asynchronous replicas besides its own program. `reducers` by stage."""

    def __init__(self, job: Job, reducers: Mapping[int, Reducer], steps: int) -> None:
        every = job.settings.eval.every if job.eval_samples else None
        self._ends = tuple(accumulate(window_lengths(steps, (every,))))  # steps behind which all meet
        self._reducers = {s: reducer for s, reducer in reducers.items() if isinstance(reducer, PushReducer)}
        self._steps = steps
        self.updates: list[Update] = []  # of the servers here, in the order of their stages
        for stage, reducer in sorted(self._reducers.items()):
            if reducer.server is not None:
                update, reducer.server.update = served(job, stage, [p.parameter for p in reducer.server.pieces])
                self.updates.append(update)

    def serve(self) -> None:
        """Start the servers of this rank; call before the first step."""
        for reducer in self._reducers.values():
            reducer.serve(self._steps)

    @property
    def lr(self) -> float | None:
        """The learning rate of the next push, where there is a server on this rank."""
        return next((update.lr for update in self.updates if update.lr is not None), None)

    def begin(self, step: int) -> None:
        """Prepare reducers and servers for step `step`; call before its first action."""
        end = next(end for end in self._ends if end > step)
        for reducer in self._reducers.values():
            reducer.meeting = step + 1 == end
            if reducer.server is not None:
                reducer.server.open(end)

    def end(self, step: int) -> None:
        """Step `step` is done: wait for the other replicas, if this is where all meet."""
        if step + 1 in self._ends:
            for reducer in self._reducers.values():
                reducer.meet()

    def pop_records(self) -> npt.NDArray[np.int64]:
        """What became of the last step's pushes: the array `pushes` of `engine.telemetry.records`."""
        rows = [(stage, *told) for stage, reducer in sorted(self._reducers.items()) for told in reducer.pop_records()]
        return np.array(rows, dtype=np.int64).reshape(-1, PUSH_COLUMNS)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, no server on this rank applies a push."""
        with ExitStack() as stack:
            for reducer in self._reducers.values():
                if reducer.server is not None:
                    stack.enter_context(reducer.server.paused())
            yield

    def check(self) -> None:
        """Raise what a server here has failed with: the worker's own waits were ended for that reason."""
        for reducer in self._reducers.values():
            if reducer.server is not None:
                reducer.server.check()

    def join(self) -> None:
        """Wait, after the last step, until nobody needs the servers of this rank any more."""
        for reducer in self._reducers.values():
            if reducer.server is not None:
                reducer.server.join()

    def close(self) -> None:
        """End the servers of this rank, however the run ended."""
        for reducer in self._reducers.values():
            if reducer.server is not None:
                reducer.server.close()


def served(job: Job, stage: int, parameters: list[torch.nn.Parameter]) -> tuple[Update, Callable[[int], None]]:
    """A server's optimizer, and what is done with each push, given the number of those before it."""
    optimizer, scheduler = build_optimizer(job, parameters)
    update = Update(parameters, optimizer, None, None)

    def apply(pushes: int) -> None:
        try:
            update.apply()
            if scheduler is not None and (pushes + 1) % job.replicas == 0:
                scheduler.step()
        except BaseException as error:
            locate(error, Place(stage, action=f"the server's update number {pushes}"))
            raise

    return update, apply
