"""When a rank stores its part of a checkpoint: training waits for the copy, a thread writes it.

    after(step)   due? ─► copy (training waits) ─► thread: write, to the disk, checksum ─► told with a later step
    the parent    all ranks have told ─► manifest, one rename (`engine.checkpoint.keeper`)

All ranks find out alike when one is due: from the step, from an evaluation whose loss all know, or from the clock of
rank 0. No rank waits for another's disk, and one that cannot write says so and goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.capture import RankState, capture
from engine.checkpoint.names import FOLDER
from engine.checkpoint.stopping import Stop
from engine.checkpoint.store import aside_of, checksum
from engine.errors import cause
from engine.files import UnwritableError
from engine.job import Job
from engine.pipeline.pipeline import Pipeline
from engine.weights.model_file import write_tensors

log = logging.getLogger(__name__)


class Checkpoints:
    """One rank's part in the checkpoints of a run. `tell` gets the meta of a `checkpoint` record."""

    def __init__(
        self,
        job: Job,
        rank: int,
        pipeline: Pipeline,
        per_epoch: int,
        steps: int,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._wanted, self._rank, self._pipeline, self._tell = job.settings.checkpoint, rank, pipeline, tell
        self._root = Path(job.run_dir) / FOLDER
        self._per_epoch, self._steps = per_epoch, steps
        self._since = time.monotonic()
        self._last = job.start if job.resumed else -1  # the step of the newest one
        self._stop = Stop(job.run_dir)
        self.stop_at: int | None = None  # the run is to end after so many steps
        self._writing: threading.Thread | None = None
        self._told: dict[str, Any] = {}

    def due(self, step: int, improved: bool) -> bool:
        """Whether one is to be made after `step` steps; all ranks ask, and get the same answer."""
        wanted = self._wanted
        if not wanted.wanted:
            return False
        self.stop_at = self._stop.at()
        if step == self._last:
            return False
        late = False
        if wanted.every_minutes is not None:
            late = self._rank == 0 and time.monotonic() - self._since >= 60 * wanted.every_minutes
            told = torch.tensor([float(late)], dtype=torch.float64, device=self._pipeline.device)
            self._pipeline.communicators.sum_losses(told)
            late = bool(told)
        return (
            late
            or step in (self._steps, self.stop_at)
            or (wanted.best and improved)
            or (wanted.every_steps is not None and step % wanted.every_steps == 0)
            or (wanted.every_epochs is not None and step % (wanted.every_epochs * self._per_epoch) == 0)
        )

    def make(self, step: int, best_loss: float | None) -> None:
        """Copy this rank's part after `step` steps, and begin to write it."""
        self.finish()
        self._since, self._last = time.monotonic(), step
        began, file = time.monotonic_ns(), f"rank-{self._rank}.safetensors"
        told: dict[str, Any] = {"rank": self._rank, "step": step, "best_loss": best_loss, "error": None}
        try:
            state = capture(self._pipeline, file)
        except ValueError as error:
            self._tell(told | {"error": cause(error), "copy_ns": time.monotonic_ns() - began})
            return
        told |= {"copy_ns": time.monotonic_ns() - began, "nbytes": state.nbytes, "extra": state.extra}
        told["update"] = None if state.update is None else state.update.model_dump(mode="json")
        told["tensors"] = [entry.model_dump(mode="json") for entry in state.stored]
        self._told = told
        folder = aside_of(self._root, step)
        self._writing = threading.Thread(
            target=self._write, args=(folder / file, state, told), name="checkpoint", daemon=True
        )
        self._writing.start()

    def look_ahead(self, following: int) -> None:
        """World rank 0: where the run is asked to end, let it be after `following` steps, when all meet next."""
        if self._rank == 0 and self._wanted.wanted and self.stop_at is None:
            self._stop.choose(following)

    def poll(self) -> None:
        """Tell of what has been written meanwhile."""
        if self._writing is not None and not self._writing.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait until what is being written is written, and tell of it."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
            self._tell(self._told)

    @staticmethod
    def _write(path: Path, state: RankState, told: dict[str, Any]) -> None:
        """Write a shard to the disk; what comes of it is added to `told`. In a thread of its own."""
        began = time.monotonic_ns()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, state.tensors, {})
            nbytes, digest = checksum(path)
            told["shard"] = {"file": path.name, "nbytes": nbytes, "sha256": digest}
        except (OSError, UnwritableError) as error:
            told["error"] = cause(error) if isinstance(error, OSError) else str(error)
        except BaseException as error:  # noqa: BLE001  # a thread's end would otherwise look like success
            told["error"] = cause(error)
        told["write_ns"] = time.monotonic_ns() - began
        with contextlib.suppress(AttributeError):
            state.tensors.clear()
