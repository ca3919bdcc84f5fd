"""The one TensorBoard writer of a run: exactly one event file, which appears with the first thing written.

Nothing else in the engine imports TensorBoard. Importing it is slow, so that happens when a Board is made: not for
jobs that are refused, and not later, when it would take processors from the workers' first steps. The scalars of a
step go into one event. Hyper-parameters are written through the same writer: `add_hparams` would open a second file,
and so a second session in the table.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FLUSH_S = 10  # what a killed parent can lose at most, beyond the steps that were flushed because they were printed

HParam = str | float | int | bool


class Board:
    """Writes into `folder`; closed at the end of the run, after which nothing may be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._make_writer, self._summaries = _tensorboard()
        self._writer: Any = None
        self._session_end: Any = None

    @property
    def opened(self) -> bool:
        return self._writer is not None

    def scalars(self, values: Mapping[str, float | None], step: int) -> None:
        """One point for each tag whose value is known."""
        if known := {tag: float(value) for tag, value in values.items() if value is not None}:
            summary = self._summaries.Summary
            points = [summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
            self._open().file_writer.add_summary(summary(value=points), step)

    def image(self, tag: str, image: Image.Image, step: int) -> None:
        self._open().add_image(tag, np.asarray(image), step, dataformats="HWC")

    def text(self, tag: str, markdown: str, step: int) -> None:
        self._open().add_text(tag, markdown, step)

    def begin_session(self, hparams: Mapping[str, HParam], metrics: Sequence[str]) -> None:
        """Declare the run in the HParams table. `metrics` are tags of scalars; their last values are shown.

        All runs are to pass the same keys with values of the same types: the table knows only what it saw first.
        """
        writer = self._open()
        summaries = self._summaries.hparams(dict(hparams), dict.fromkeys(metrics, 0.0))
        experiment, start, self._session_end = summaries
        writer.file_writer.add_summary(experiment)
        writer.file_writer.add_summary(start)

    def end_session(self) -> None:
        """Mark the session as successful; one that failed or was interrupted stays without an end."""
        if self._session_end is not None:
            self._open().file_writer.add_summary(self._session_end)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = self._make_writer(str(self._folder), flush_secs=FLUSH_S)
        return self._writer


def _tensorboard() -> tuple[Any, Any]:
    """torch's writer and its makers of summaries, which have no types."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # an installed TensorFlow greets at length
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports; none is about this run
        from torch.utils.tensorboard import SummaryWriter, summary
    return SummaryWriter, summary
