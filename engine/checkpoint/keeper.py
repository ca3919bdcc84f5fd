"""The parent's side of checkpoints: all ranks have written, so one becomes visible; old ones go.

record `checkpoint` of every rank ─► all well: manifest, one rename, the oldest removed
                                  ─► one failed: nothing becomes visible, nothing older is lost, it is reported
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.checkpoint import store
from engine.checkpoint.manifest import (
    FORMAT,
    VERSION,
    DamagedError,
    Loader,
    Manifest,
    Shard,
    Stored,
    Update,
    read_manifest,
)
from engine.checkpoint.names import FOLDER
from engine.checkpoint.stopping import Stop
from engine.errors import CheckpointError
from engine.job import Job
from engine.telemetry.records import Record


class Keeper:
    """Makes the checkpoints of one run visible: call it with every record, and `close` it at the end.

    `versions`: of what computes. `progress`: what the summary so far holds, asked for at each checkpoint. `say(level,
    text)` reports.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        versions: dict[str, str],
        progress: Callable[[], dict[str, Any]],
        say: Callable[[int, str], None],
    ) -> None:
        self._job, self._root, self._versions = job, folder / FOLDER, versions
        self._progress, self._say, self._stop = progress, say, Stop(str(folder))
        self._pending: dict[int, dict[int, dict[str, Any]]] = {}
        self._best: tuple[float, int] | None = None
        if job.settings.checkpoint.best:
            self._best = self._best_stored()

    def begin(self) -> None:
        """Remove what a run that was killed has left half-written; call before the ranks start."""
        store.sweep(self._root)
        self._stop.clear()

    def __call__(self, record: Record) -> None:
        """Take in a record, and make the checkpoint that it completes. Raises CheckpointError where that is wanted."""
        if record.kind != "checkpoint":
            return
        step = record.meta["step"]
        told = self._pending.setdefault(step, {})
        told[record.meta["rank"]] = record.meta
        if len(told) == self._job.world:
            del self._pending[step]
            self._complete(step, [told[rank] for rank in sorted(told)])

    def close(self) -> None:
        """Remove what was not finished."""
        self._pending.clear()
        store.sweep(self._root)
        self._stop.clear()

    def _complete(self, step: int, told: list[dict[str, Any]]) -> None:
        failed = next((meta for meta in told if meta["error"]), None)
        error = None if failed is None else f"rank {failed['rank']}: {failed['error']}"
        if error is None:
            try:
                store.commit(self._root, self._manifest(step, told))
            except (OSError, ValueError) as problem:
                error = str(getattr(problem, "strerror", None) or problem)
        if error is not None:
            store.discard(store.aside_of(self._root, step))
            said = f"the checkpoint after {step} steps could not be made: {error}"
            if self._job.settings.checkpoint.on_failure == "stop":
                raise CheckpointError(said)
            self._say(logging.WARNING, f"{said}; training goes on")
            return
        copied, nbytes = max(meta["copy_ns"] for meta in told), sum(meta["nbytes"] for meta in told)
        self._say(
            logging.INFO,
            f"checkpoint after {step} steps: {nbytes / 1e6:.1f} MB, training waited {copied / 1e6:.1f} ms",
        )
        loss = told[0]["best_loss"]
        if loss is not None and (self._best is None or loss < self._best[0]):
            self._best = loss, step
        spare = {self._best[1]} if self._best and self._job.settings.checkpoint.best else set()
        store.prune(self._root, self._job.settings.checkpoint.keep, spare)

    def _manifest(self, step: int, told: list[dict[str, Any]]) -> Manifest:
        job, data = self._job, self._job.settings.data
        size, drop = job.settings.train.global_batch_size, bool(data.get("drop_last", False))
        per_epoch = job.train_samples // size if drop else -(-job.train_samples // size)
        epochs, rest = divmod(step, per_epoch)
        of_epoch = per_epoch * size if drop else job.train_samples
        extra: dict[str, Any] = {}
        for meta in told:
            extra |= meta["extra"]
        return Manifest(
            format=FORMAT,
            version=VERSION,
            step=step,
            samples=epochs * of_epoch + min(rest * size, of_epoch),
            epoch=epochs,
            loader=Loader(
                seed=job.settings.seed,
                samples=job.train_samples,
                global_batch_size=size,
                shuffle=bool(data.get("shuffle", True)),
                drop_last=drop,
            ),
            shards=tuple(Shard.model_validate(meta["shard"]) for meta in told),
            tensors=tuple(Stored.model_validate(entry) for meta in told for entry in meta["tensors"]),
            updates=tuple(Update.model_validate(meta["update"]) for meta in told if meta["update"] is not None),
            extra=extra,
            best_loss=told[0]["best_loss"],
            progress=self._progress(),
            config=asdict(job.settings),
            versions=self._versions | {"python": platform.python_version()},
        )

    def _best_stored(self) -> tuple[float, int] | None:
        """(loss, step) of the best among those that are there."""
        found = []
        for step in store.steps_of(self._root):
            try:
                loss = read_manifest(store.folder_of(self._root, step)).best_loss
            except DamagedError:
                continue
            if loss is not None and math.isfinite(loss):
                found.append((loss, step))
        return min(found, default=None)
