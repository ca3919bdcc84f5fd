"""What a run leaves of its weights: model.safetensors, the last ones or those of the best evaluation, or nothing."""

from __future__ import annotations

import logging
from pathlib import Path

from engine.errors import ExhaustedError
from engine.files import UnwritableError
from engine.job import Job
from engine.pipeline.pipeline import Pipeline
from engine.transport import Transport
from engine.weights.gather import gather
from engine.weights.model_file import write_tensors
from engine.weights.names import MODEL

log = logging.getLogger(__name__)


class KeptWeights:
    """Writes `model.safetensors` as `save` asks; all ranks call its methods, world rank 0 writes."""

    def __init__(self, job: Job, rank: int, pipeline: Pipeline, transport: Transport) -> None:
        self._save, self._path, self._writes = job.settings.save, Path(job.run_dir) / MODEL, rank == 0
        self._pipeline, self._transport = pipeline, transport

    def improved(self, step: int, loss: float | None) -> None:
        """Keep the weights after `step` steps, whose evaluation has the lowest `loss` so far."""
        if self._save == "best":
            self._write(step, {"evaluation_loss": repr(loss)})

    def ended(self, step: int) -> None:
        """Keep the last weights, where these are wanted."""
        if self._save == "final":
            self._write(step, {})
        elif self._save == "best" and self._writes and not self._path.exists():
            log.warning("save=best: no evaluation had a finite loss, so there is no %s", MODEL)

    def _write(self, step: int, more: dict[str, str]) -> None:
        self._pipeline.updater.all_ready()
        state = gather(self._pipeline.stages, self._pipeline.tables.placement, self._transport)
        if not self._writes:
            return
        try:
            write_tensors(self._path, state, {"step": str(step), **more})
        except UnwritableError as error:  # what the run was for would be lost
            cause = error.__cause__
            raise ExhaustedError(cause.errno if isinstance(cause, OSError) else 0, str(error)) from error
