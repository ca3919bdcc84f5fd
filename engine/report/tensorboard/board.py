"""The one TensorBoard writer of a run: exactly one event file, which appears with the first thing written.

Nothing else in the engine imports TensorBoard. Importing it is slow, so that happens when a Board is made: not for
jobs that are refused, and not later, when it would take processors from the workers' first steps. The scalars of a
step go into one event. Hyper-parameters are written through the same writer: `add_hparams` would open a second file,
and so a second session in the table.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.files import writing
from engine.report.pictures.figure import Picture
from engine.report.tensorboard import series
from engine.report.tensorboard.hparams import HParam

_ENDS = {"completed": 1, "failed": 2}  # TensorBoard's numbers for the status of a session
_RGBA = 4  # TensorBoard's number for it
_DATA_CLASS_TENSOR = 2  # TensorBoard's number for it
BINS = 30  # of a histogram
EVENTS = "events.out.tfevents"  # how the name of the one event file begins
FLUSH_S = 10  # what a killed parent can lose at most, beyond the steps that were flushed because they were printed


class Board:
    """The event file of a run in `folder`; after `close` nothing may be written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._make_writer, self._summaries = _tensorboard()
        self._writer: Any = None
        self._session = False
        self._hook, threading.excepthook = threading.excepthook, self._of_a_thread

    @property
    def opened(self) -> bool:
        """Whether the event file is there, which is so once something was written."""
        return self._writer is not None

    def scalars(self, values: Mapping[str, float | None], step: int) -> None:
        """One point for each tag whose value is known."""
        if known := {tag: float(value) for tag, value in values.items() if value is not None}:
            summary = self._summaries.Summary
            points = [summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
            self._add(summary(value=points), step)

    def histograms(self, values: Mapping[str, npt.NDArray[np.float64]], step: int) -> None:
        """One histogram for each tag."""
        points = [self._summaries.histogram(tag, numbers, BINS).value[0] for tag, numbers in values.items()]
        if points:
            self._add(self._summaries.Summary(value=points), step)

    def layout(self, charts: Mapping[str, Mapping[str, Any]]) -> None:
        """Lay out the page of custom scalars; `charts` as `curves.layout` gives them."""
        from tensorboard.plugins.custom_scalar import layout_pb2, metadata

        categories = [
            layout_pb2.Category(
                title=category, chart=[_chart(layout_pb2, title, curves) for title, curves in each.items()]
            )
            for category, each in charts.items()
        ]
        content = layout_pb2.Layout(category=categories).SerializeToString()
        self._bytes(metadata.CONFIG_SUMMARY_TAG, content, 0, metadata.PLUGIN_NAME)

    def image(self, tag: str, picture: Picture, step: int) -> None:
        """Write a picture, as its PNG."""
        summary, width, height = self._summaries.Summary, picture.scale * picture.width, picture.scale * picture.height
        image = summary.Image(width=width, height=height, colorspace=_RGBA, encoded_image_string=picture.png)
        self._add(summary(value=[summary.Value(tag=tag, image=image)]), step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Write a text in Markdown, for TensorBoard's tab of texts."""
        with self._writing():
            self._open().add_text(tag, markdown, step)

    def document(self, step: int, document: str, about: bytes) -> None:
        """A series of its own for the document of one step; `about` is what lists of steps show of it."""
        self._bytes(series.tag_of(step), series.packed(document), step, series.PLUGIN, about)

    def begin_session(self, hparams: Mapping[str, HParam], metrics: Sequence[str]) -> None:
        """Declare the run in the HParams table. `metrics` are tags of scalars; their last values are shown.

        All runs are to pass the same keys with values of the same types: the table knows only what it saw first.
        """
        summaries = self._summaries.hparams(dict(hparams), dict.fromkeys(metrics, 0.0))
        for one in summaries[:2]:  # the third would say that it has ended
            self._add(one)
        self._session = True

    def end_session(self, status: str) -> None:
        """Mark the session as successful or failed; one that was interrupted stays without an end."""
        if not self._session or status not in _ENDS:
            return
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2

        ended = plugin_data_pb2.SessionEndInfo(status=_ENDS[status], end_time_secs=time.time())
        told = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=ended))
        summary = self._summaries.Summary
        value = summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=told)
        self._add(summary(value=[value]))

    def take_over(self, events: Iterable[Any]) -> None:
        """Write events of another file, as they are, before anything else."""
        with self._writing():
            for event in events:
                self._open().file_writer.event_writer.add_event(event)

    def flush(self) -> None:
        """Bring what was written to the file. Raises UnwritableError where the folder takes no more."""
        if self._writer is not None:
            with self._writing():
                self._writer.flush()

    def close(self) -> None:
        """Write what is left and end the file. Raises UnwritableError where the folder takes no more."""
        try:
            if self._writer is not None:
                with self._writing():
                    self._writer.close()
        finally:
            self._give_hook_back()

    def _give_hook_back(self) -> None:
        """Once a writer's thread that has failed has told the present one."""
        for thread in threading.enumerate():
            if _of_a_writer(thread) and getattr(thread, "exception", None) is not None:
                thread.join(FLUSH_S)
        if threading.excepthook == self._of_a_thread:
            threading.excepthook = self._hook

    def _of_a_thread(self, failed: threading.ExceptHookArgs) -> None:
        """What the writer's thread raises, the next call here raises again: one report is enough."""
        if not _of_a_writer(failed.thread):
            self._hook(failed)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._folder / EVENTS)

    def _add(self, summary: Any, step: int | None = None) -> None:
        with self._writing():
            self._open().file_writer.add_summary(summary, step)

    def _bytes(self, tag: str, content: bytes, step: int, plugin: str, about: bytes = b"") -> None:
        """A point that a plugin reads: of the class of tensors, without which a loader would keep nothing of it."""
        summary = self._summaries.Summary
        data = self._summaries.SummaryMetadata.PluginData(plugin_name=plugin, content=about)
        metadata = self._summaries.SummaryMetadata(plugin_data=data, data_class=_DATA_CLASS_TENSOR)
        tensor = self._summaries.TensorProto(
            dtype="DT_STRING", string_val=[content], tensor_shape=self._summaries.TensorShapeProto()
        )
        value = summary.Value(tag=tag, tensor=tensor, metadata=metadata)
        self._add(summary(value=[value]), step)

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = self._make_writer(str(self._folder), flush_secs=FLUSH_S)
        return self._writer


def _of_a_writer(thread: threading.Thread | None) -> bool:
    return type(thread).__module__.startswith("tensorboard")


def _chart(made: Any, title: str, curves: Sequence[Any]) -> Any:
    """Names of curves share one chart as lines; triples (curve, lower, upper) as bands."""
    if isinstance(curves[0], str):
        return made.Chart(title=title, multiline=made.MultilineChartContent(tag=curves))
    bands = [made.MarginChartContent.Series(value=v, lower=low, upper=up) for v, low, up in curves]
    return made.Chart(title=title, margin=made.MarginChartContent(series=bands))


def _tensorboard() -> tuple[Any, Any]:
    """The writer of torch and its makers of summaries, which have no types."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # an installed TensorFlow greets at length
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports; none is about this run
        from torch.utils.tensorboard import SummaryWriter, summary
    return SummaryWriter, summary
