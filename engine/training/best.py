"""The lowest loss of all evaluations so far, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from engine.job import Job
from engine.pipeline.pipeline import Pipeline


class BestLoss:
    """Knows the lowest evaluation loss, where `save` or `checkpoint.best` asks for it; all ranks call `improves`."""

    def __init__(self, job: Job, pipeline: Pipeline) -> None:
        self._wanted = job.settings.save == "best" or job.settings.checkpoint.best
        self._pipeline = pipeline
        self.loss: float | None = None

    def improves(self, records: Sequence[dict[str, Any]]) -> bool:
        """Whether an evaluation has the lowest loss so far; `records` are this rank's of it."""
        if not self._wanted:
            return False
        sums = [sum(record[name] for record in records) for name in ("loss_sum", "loss_count")]
        found = torch.tensor(sums, dtype=torch.float64, device=self._pipeline.device)
        self._pipeline.communicators.sum_losses(found)
        total, count = found.tolist()
        loss = total / count if count else math.nan
        if not math.isfinite(loss) or (self.loss is not None and loss >= self.loss):
            return False
        self.loss = loss
        return True
