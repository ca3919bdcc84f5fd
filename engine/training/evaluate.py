"""Evaluation: the held-out samples through the same pipeline, forward only, with exact counts.

Training is untouched by it: no gradient, no random number, no statistic of the training changes, nor anything that the
loss keeps: a copy of it is asked. Where there are replicas each takes its share; those other than the first borrow the
first one's buffers (BatchNorm's running statistics differ between replicas) and get their own back. Of two copies of a
stage the first evaluates, with its own buffers: the weights are the same, the statistics differ as between replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.job import Job
from engine.pipeline.batches.batch import ReplicaBatch
from engine.pipeline.batches.microbatch import passes, sizes
from engine.pipeline.dtypes import to_device
from engine.pipeline.pipeline import Pipeline
from engine.pipeline.seeds import seeded
from engine.ranks import Rank
from engine.telemetry.position import Place, locate
from engine.training.build import DTYPES
from engine.training.samples.batches import Batches
from engine.training.samples.source import dataset, loader, pair


class Evaluation:
    """Runs evaluations of one rank. The held-out data set is built at the first one, on the ends only."""

    def __init__(self, job: Job, rank: int, pipeline: Pipeline) -> None:
        self._job, self._pipeline, self._device = job, pipeline, pipeline.device
        _, self._replica, pipeline_rank = Rank.of(rank, job.ranks)
        size = job.settings.eval.batch_size or job.settings.train.global_batch_size
        self._batches = Batches(job.eval_samples, size, job.replicas, job.settings.seed, shuffle=False)
        own = job.placement.first_copies(pipeline_rank)
        self._first, self._last = 0 in own, job.placement.stages - 1 in own
        self._data: Any = None
        self._scoring = pipeline.loss  # of one evaluation: a copy

    def run(self, steps_done: int) -> list[dict[str, Any]]:
        """Evaluate; on the last stage's rank a list of one record (see `telemetry.records`), else an empty one."""
        if not self._job.eval_samples:
            return []
        if self._last:
            self._scoring = self._pipeline.loss.apart(training=False)
        with self._pipeline.evaluating():
            tally = self._tally()
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
                batch = ReplicaBatch(given, target, [piece])
                self._pipeline.run_evaluation(batch, self._scoring, self._scorer(index, piece, tally))
        return tally

    @staticmethod
    def _load(data: Any) -> tuple[Any, Any]:
        try:
            return pair(next(data))
        except Exception as error:
            locate(error, Place(action="loading the samples of an evaluation"))
            raise

    def _scorer(self, batch: int, piece: list[int], tally: dict[str, Any]) -> Callable[[Any, Any, int], None]:
        """What adds the output of a micro-batch to the tally."""
        loss = self._scoring
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

        return evaluated

    def _samples(self) -> Any:
        if not (self._first or self._last):
            return iter(())
        if self._data is None:
            self._data = dataset(self._job.settings.data, evaluation=True)
        count = self._batches.per_epoch
        return loader(self._job.settings.data, self._data, self._batches, self._replica, count, self._device)
