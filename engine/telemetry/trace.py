"""Recording where a rank's time goes.

A mark is a moment; a span is a kind of work between two marks. On a CPU a mark is CLOCK_MONOTONIC in nanoseconds,
which all processes of a host share. On a GPU the host runs ahead of the work it queues, so a mark is an event on the
current stream: it says when the device got there. Events are turned into the host's clock once per step, by one
synchronisation and one anchor, so tracing costs no wait inside the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.plan.timeline import Kind
from engine.telemetry.records import END, SPAN_COLUMNS, START

_Spans = list[Any]  # SPAN_COLUMNS entries for each, one after another: a list of numbers is soon an array
_ReadMark = Callable[[Any], int]  # a mark on the host's clock, in nanoseconds


class Traced:
    """The recording of one step; `window` in nanoseconds. All else is read when there is time for it."""

    def __init__(
        self,
        spans: _Spans,
        pairs: list[tuple[int, int]],
        layers: _Spans,
        window: tuple[int, int],
        read: _ReadMark | None,
    ) -> None:
        self.window = window
        self._spans, self._pairs, self._layers, self._read = spans, pairs, layers, read

    def spans(self) -> npt.NDArray[np.int64]:
        """The spans of the step, [n, 5] as in `engine.telemetry.records`."""
        return self._rows(self._spans)

    def pairs(self) -> npt.NDArray[np.int64]:
        """The overlapped pairs of the step, [k, 2] by index of span."""
        return np.array(self._pairs, dtype=np.int64).reshape(-1, 2)

    def layers(self) -> dict[int, int]:
        """What the forwards of each layer took in nanoseconds, by the layer's number."""
        lasted: dict[int, int] = {}
        for _, number, _, start, end in self._rows(self._layers).tolist():
            lasted[number] = lasted.get(number, 0) + end - start
        return lasted

    def _rows(self, spans: _Spans) -> npt.NDArray[np.int64]:
        if self._read is not None:
            spans = spans.copy()
            for column in (START, END):
                spans[column::SPAN_COLUMNS] = map(self._read, spans[column::SPAN_COLUMNS])
        return np.array(spans, dtype=np.int64).reshape(-1, SPAN_COLUMNS)


class Tracer:
    """Records the spans of the current step. `on` is false in steps that are not traced: marks are then free."""

    def __init__(self) -> None:
        self.on = True
        self.window_start = self.now()
        self._spans: _Spans = []
        self._pairs: list[tuple[int, int]] = []
        self._layers: _Spans = []  # as spans, the layer's number for a stage

    def now(self) -> int:
        """This moment on the host, in nanoseconds."""
        return time.monotonic_ns()

    def mark(self) -> Any:
        """A mark at this moment of the rank's work."""
        return time.monotonic_ns() if self.on else 0

    def add(self, kind: Kind, stage: int, microbatch: int, start: Any, end: Any) -> int:
        """Record a span; returns its number in this step."""
        if self.on:
            self._spans.extend((kind, stage, microbatch, start, end))
        return len(self._spans) // SPAN_COLUMNS - 1

    def add_pair(self, first: int, second: int) -> None:
        """Record that the spans of these numbers are one overlapped pair."""
        if self.on:
            self._pairs.append((first, second))

    def add_host(self, kind: Kind, stage: int, microbatch: int, start_ns: int, end_ns: int) -> None:
        """Record a span that was measured on the host's clock."""
        if self.on:
            self._spans.extend((kind, stage, microbatch, start_ns, end_ns))

    def add_layer(self, number: int, start: Any, end: Any) -> None:
        """Record a layer's forward, which lies within the span of its stage's."""
        if self.on:
            self._layers.extend((Kind.F, number, -1, start, end))

    def finish(self) -> Traced:
        """Close the window of a step; the next one starts here."""
        read, end = self._reader()
        traced = Traced(self._spans, self._pairs, self._layers, (self.window_start, end), read)
        self._begin(end)
        return traced

    def pause_ended(self) -> None:
        """Leave out the time since the last window, such as an evaluation or a checkpoint: it belongs to no step."""
        self._begin(self.now())

    def _begin(self, start: int) -> None:
        self._spans, self._pairs, self._layers, self.window_start = [], [], [], start

    def _reader(self) -> tuple[_ReadMark | None, int]:
        """How the marks so far are read, where they are not yet what they say; and this moment."""
        return None, self.now()


class CudaTracer(Tracer):
    """A tracer whose marks are CUDA events with timing on the current stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        super().__init__()

    def mark(self) -> Any:
        """A recorded CUDA event on the current stream, to be read when the step is over; 0 while nothing is traced."""
        if not self.on:
            return 0
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def now(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC, once the device has done all it was given."""
        torch.cuda.synchronize(self.device)
        return time.monotonic_ns()

    def _reader(self) -> tuple[_ReadMark | None, int]:
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record(torch.cuda.current_stream(self.device))
        host = self.now()

        def read(mark: Any) -> int:
            return mark if isinstance(mark, int) else host - round(mark.elapsed_time(anchor) * 1e6)

        return read, host


def tracer_for(device: torch.device) -> Tracer:
    """The tracer for a device: of CUDA events on a GPU, of the host's clock elsewhere."""
    return CudaTracer(device) if device.type == "cuda" else Tracer()
