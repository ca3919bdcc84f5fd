"""Evaluation: the held-out samples through the same pipeline, forward only, with exact counts.

Training is untouched by it: no gradient, no random number, no statistic of the training changes, nor anything that the
loss keeps: a copy of it is asked. Where there are replicas each takes its share; those other than the first borrow the
first one's buffers (BatchNorm's running statistics differ between replicas) and get their own back. Of two copies of a
stage the first evaluates, with its own buffers: the weights are the same, the statistics differ as between replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.job import Job
from engine.pipeline.executor import Executor
from engine.pipeline.losses import Loss
from engine.pipeline.microbatch import Batches, offsets, passes, sizes, take
from engine.pipeline.modes import evaluating
from engine.pipeline.row import Feed
from engine.pipeline.seeds import seeded
from engine.pipeline.stage import Draw, Stage
from engine.telemetry.position import Place, locate
from engine.training.build import DTYPES, Wiring
from engine.training.source import dataset, loader, pair, to_device


class Evaluation:
    """Runs evaluations of one rank. The held-out data set is built at the first one, on the ends only."""

    def __init__(
        self,
        job: Job,
        rank: int,
        device: torch.device,
        executor: Executor,
        stages: Mapping[int, Stage],
        wiring: Wiring,
        loss: Loss,
    ) -> None:
        self._job, self._device = job, device
        self._replica, pipeline_rank = divmod(rank, job.ranks)
        self._executor, self._stages, self._wiring, self._loss = executor, stages, wiring, loss
        size = job.settings.eval.batch_size or job.settings.train.global_batch_size
        self._batches = Batches(job.eval_samples, size, job.replicas, job.settings.seed, shuffle=False)
        self._own = job.placement.first_copies(pipeline_rank)
        self._first, self._last = 0 in self._own, job.placement.stages - 1 in self._own
        self._data: Any = None
        self._scoring = loss  # of one evaluation: a copy

    def run(self, steps_done: int) -> list[dict[str, Any]]:
        """Evaluate; on the last stage's rank a list of one record (see `telemetry.records`), else an empty one."""
        if not self._job.eval_samples:
            return []
        own = self._borrow()
        if self._last:
            self._scoring = self._loss.apart(training=False)
        with evaluating(layer.module for stage in self._stages.values() for layer in stage.layers):
            tally = self._tally()
        self._restore(own)
        self._executor.links.limit(0)
        return [{"step": steps_done} | tally] if self._last else []

    def _tally(self) -> dict[str, Any]:
        tally: dict[str, Any] = {"samples": 0, "loss_sum": 0.0, "loss_count": 0.0, "correct": 0, "scored": 0}
        data = self._samples()
        dtype = DTYPES[self._job.settings.precision]
        for index in range(self._batches.per_epoch):
            rows = sizes(self._batches.count(index), self._job.replicas)[self._replica]
            for piece in passes(rows, 1, self._job.settings.pipeline.microbatches, lambda m: m):
                given, target = self._load(data) if self._first or self._last else (None, None)
                given = to_device(given, self._device, dtype) if self._first else None
                target = to_device(target, self._device, dtype) if self._last else None
                program = self._job.evaluations[len(piece)]
                self._executor.run(program, self._feed(index, piece, given, target, tally))
        return tally

    @staticmethod
    def _load(data: Any) -> tuple[Any, Any]:
        try:
            return pair(next(data))
        except Exception as error:
            locate(error, Place(action="loading the samples of an evaluation"))
            raise

    def _feed(self, batch: int, piece: list[int], given: Any, target: Any, tally: dict[str, Any]) -> Feed:
        starts, total, loss = offsets(piece), sum(piece), self._scoring
        draws = self._job.random_loss, self._device, self._job.settings.seed, "scoring", batch

        def evaluated(output: Any, expected: Any, microbatch: int) -> None:
            tally["samples"] += piece[microbatch]
            with seeded(*draws, microbatch, self._replica):
                tally["loss_sum"] += float(loss(output, expected))
            with seeded(*draws, microbatch, self._replica):
                tally["loss_count"] += loss.count(expected, self._job.boundaries["eval", piece[microbatch]][-1])
            scored = loss.scored(output, expected)
            if scored is None:
                tally["correct"] = tally["scored"] = None
            else:
                tally["correct"] += scored[0]
                tally["scored"] += scored[1]

        return Feed(
            sizes=piece,
            input=lambda m: take(given, starts[m], piece[m], total),
            target=lambda m: take(target, starts[m], piece[m], total),
            draw=lambda m: Draw(0, m, self._replica),
            loss=loss,
            count=lambda m: 0.0,
            evaluated=evaluated,
        )

    def _samples(self) -> Any:
        if not (self._first or self._last):
            return iter(())
        if self._data is None:
            self._data = dataset(self._job.settings.data, evaluation=True)
        count = self._batches.per_epoch
        return loader(self._job.settings.data, self._data, self._batches, self._replica, count, self._device)

    def _borrow(self) -> list[tuple[Tensor, Tensor]]:
        """Give every copy of a stage the buffers of replica 0's first; (buffer, its own value) pairs to restore."""
        if self._job.replicas == 1:
            return []
        own = [(b, b.clone()) for s in sorted(self._stages) for _, b in self._stages[s].named_buffers()]
        for stage in sorted(self._stages):
            for _, buffer in self._stages[stage].named_buffers():
                lends = self._replica == 0 and stage in self._own
                flat = buffer.flatten().clone() if lends else torch.zeros_like(buffer).flatten()
                # As bytes: with zeros they add up to themselves, whatever the dtype and the backend.
                self._wiring.reduction[stage].all_reduce(flat.view(torch.uint8))
                buffer.copy_(flat.view_as(buffer))
        return own

    @staticmethod
    def _restore(own: list[tuple[Tensor, Tensor]]) -> None:
        for buffer, value in own:
            buffer.copy_(value)
