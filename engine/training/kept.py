"""What a run leaves of its weights: model.safetensors, the last ones or those of the best evaluation, or nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.errors import ExhaustedError
from engine.files import UnwritableError
from engine.job import Job
from engine.pipeline.pipeline import Pipeline
from engine.weights.model_file import write_tensors
from engine.weights.source import MODEL

log = logging.getLogger(__name__)


class KeptWeights:
    """Writes `model.safetensors` as `save` asks; all ranks call its methods, world rank 0 writes."""

    def __init__(self, job: Job, rank: int, pipeline: Pipeline) -> None:
        self._save, self._path, self._writes = job.settings.save, Path(job.run_dir) / MODEL, rank == 0
        self._pipeline = pipeline
        self._best = math.inf

    def evaluated(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Keep the weights after `step` steps where they are the best so far; `records`: of this rank's evaluation."""
        if self._save != "best":
            return
        sums = [sum(record[name] for record in records) for name in ("loss_sum", "loss_count")]
        total, count = self._pipeline.whole_state.add_up(torch.tensor(sums, dtype=torch.float64)).tolist()
        loss = total / count if count else math.nan
        if loss < self._best:
            self._best = loss
            self._write(step, {"evaluation_loss": repr(loss)})

    def ended(self, step: int) -> None:
        """Keep the last weights, where these are wanted."""
        if self._save == "final":
            self._write(step, {})
        elif self._save == "best" and math.isinf(self._best) and self._writes:
            log.warning("save=best: no evaluation had a finite loss, so there is no %s", MODEL)

    def _write(self, step: int, more: dict[str, str]) -> None:
        self._pipeline.updater.all_ready()
        state = self._pipeline.whole_state.gather(keep=self._writes)
        if not self._writes:
            return
        try:
            write_tensors(self._path, state, {"step": str(step), **more})
        except UnwritableError as error:  # what the run was for would be lost
            cause = error.__cause__
            raise ExhaustedError(cause.errno if isinstance(cause, OSError) else 0, str(error)) from error
