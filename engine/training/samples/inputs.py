"""From the data set to what the executor is fed: a replica's share of a global batch, pass by pass.

The share of step t+1 is fetched in step t, when the rank first waits for a message: loading hides in the bubble, in
the same thread. What a data set draws does not depend on when that is (`source.loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.job import Job
from engine.pipeline.batches.batch import ReplicaBatch
from engine.pipeline.batches.microbatch import passes, sizes
from engine.pipeline.dtypes import to_device
from engine.plan.timeline import Kind
from engine.ranks import Rank
from engine.telemetry.position import Place, locate
from engine.telemetry.trace import Tracer
from engine.training.build import DTYPES
from engine.training.delay import SlowDataset
from engine.training.samples.batches import Batches
from engine.training.samples.source import dataset, loader, pair


class BatchStream:
    """One replica's batches, as far as a world rank needs them: inputs with the first stage, targets with the last.

    `legal(m)`: the largest number of micro-batches, at most m, for which there is a program. Ranks in the middle open
    no data set. Waiting for data is traced.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        device: torch.device,
        tracer: Tracer,
        legal: Callable[[int], int],
    ) -> None:
        settings = job.settings
        shuffle, drop = bool(settings.data.get("shuffle", True)), bool(settings.data.get("drop_last", False))
        self.batches = Batches(
            job.train_samples, settings.train.global_batch_size, job.replicas, settings.seed, shuffle, drop
        )
        self.steps = self.batches.steps(settings.train.steps, settings.train.epochs)
        self._job, self._device, self._tracer, self._legal = job, device, tracer, legal
        _, self._replica, self._rank = Rank.of(rank, job.ranks)
        stages = job.placement.stages_of(self._rank)
        self._first, self._last = 0 in stages, job.placement.stages - 1 in stages
        self._held: dict[int, ReplicaBatch] = {}
        self._data: Iterator[Any] = iter(())
        if (self._first or self._last) and job.start < self.steps:
            data = dataset(settings.data, evaluation=False)
            assert data is not None
            if settings.delay.sample_ms:
                data = SlowDataset(data, settings.delay.sample_ms * 1e-3)
            self._data = loader(settings.data, data, self.batches, self._replica, self.steps, device, job.start)

    def close(self) -> None:
        """Let go of the loader, whose processes end with it."""
        self._data = iter(())

    def take(self, step: int) -> ReplicaBatch:
        """This replica's batch of a step, loaded if it is not yet; steps are taken in order."""
        self.fetch(step)
        return self._held.pop(step)

    def fetch(self, step: int) -> None:
        """Load the batch of a step ahead; does nothing where it is loaded already or the run has no such step."""
        if step in self._held or step >= self.steps:
            return
        settings, pieces = self._job.settings, self.pieces(step)
        given = target = None
        if pieces and (self._first or self._last):
            start = self._tracer.mark()
            given, target = self._load(step)
            dtype = DTYPES[settings.precision]
            given = to_device(given, self._device, dtype) if self._first else None
            target = to_device(target, self._device, dtype) if self._last else None
            self._tracer.add(Kind.WAIT_DATA, -1, -1, start, self._tracer.mark())
        self._held[step] = ReplicaBatch(given, target, pieces)

    def pieces(self, step: int) -> list[list[int]]:
        """Samples in each micro-batch of each pass of a step."""
        rows = sizes(self.batches.count(step), self._job.replicas)[self._replica]
        return passes(rows, self._job.settings.train.accumulate, self._job.microbatches, self._legal)

    def _load(self, step: int) -> tuple[Any, Any]:
        try:
            return pair(next(self._data))
        except Exception as error:
            # It may happen in the middle of another step's action, which has nothing to do with it.
            locate(error, Place(action=f"loading the samples of step {step}"))
            raise
