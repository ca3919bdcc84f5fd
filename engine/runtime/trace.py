"""Recording where a rank's time goes.

A mark is a moment; a span is a kind of work between two marks. On a CPU a mark is CLOCK_MONOTONIC in nanoseconds,
which all processes of a host share. On a GPU the host runs ahead of the work it queues, so a mark is an event on the
current stream: it says when the device got there. Events are turned into the host's clock once per step, by one
synchronisation and one anchor, so tracing costs no wait inside the step.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.plan.timeline import Kind
from engine.records import SPAN_COLUMNS


class Traced(NamedTuple):
    """A step: `spans` [n, 5] as in `engine.records`; `pairs` [k, 2] by index of span; `window` in nanoseconds;
    `layers`: a layer's number -> what its forwards took, in nanoseconds."""

    spans: npt.NDArray[np.int64]
    pairs: npt.NDArray[np.int64]
    window: tuple[int, int]
    layers: dict[int, int]


class Tracer:
    """Spans of the current step. `on` is false in steps that are not traced: marks are then free."""

    def __init__(self) -> None:
        self.on = True
        self.window_start = self.now()
        self._spans: list[tuple[int, int, int, Any, Any]] = []
        self._pairs: list[tuple[int, int]] = []
        self._layers: list[tuple[int, int, int, Any, Any]] = []  # as spans, the layer's number for a stage

    def now(self) -> int:
        """This moment on the host, in nanoseconds."""
        return time.monotonic_ns()

    def mark(self) -> Any:
        """This moment of the rank's work."""
        return time.monotonic_ns() if self.on else 0

    def add(self, kind: Kind, stage: int, microbatch: int, start: Any, end: Any) -> int:
        """Record a span; its number in this step."""
        if self.on:
            self._spans.append((kind, stage, microbatch, start, end))
        return len(self._spans) - 1

    def add_pair(self, first: int, second: int) -> None:
        """The spans of these numbers are one overlapped pair."""
        if self.on:
            self._pairs.append((first, second))

    def add_host(self, kind: Kind, stage: int, microbatch: int, start_ns: int, end_ns: int) -> None:
        """A span that was measured on the host's clock."""
        if self.on:
            self._spans.append((kind, stage, microbatch, start_ns, end_ns))

    def add_layer(self, number: int, start: Any, end: Any) -> None:
        """A layer's forward, within the span of its stage's."""
        if self.on:
            self._layers.append((Kind.F, number, -1, start, end))

    def finish(self) -> Traced:
        """Close the window of a step; the next one starts here."""
        rows = np.array(self._nanoseconds([*self._spans, *self._layers]), dtype=np.int64).reshape(-1, SPAN_COLUMNS)
        spans, layers = rows[: len(self._spans)], rows[len(self._spans) :]
        pairs = np.array(self._pairs, dtype=np.int64).reshape(-1, 2)
        numbers, place = np.unique(layers[:, 1], return_inverse=True)
        lasted = np.zeros(len(numbers), dtype=np.int64)
        np.add.at(lasted, place, layers[:, 4] - layers[:, 3])
        end = self.now()
        window = (self.window_start, end)
        self._begin(end)
        return Traced(spans, pairs, window, dict(zip(numbers.tolist(), lasted.tolist(), strict=True)))

    def pause_ended(self) -> None:
        """What went on since the last window (an evaluation, a checkpoint) belongs to no step."""
        self._begin(self.now())

    def _begin(self, start: int) -> None:
        self._spans, self._pairs, self._layers, self.window_start = [], [], [], start

    def _nanoseconds(self, spans: list[tuple[int, int, int, Any, Any]]) -> list[tuple[int, int, int, int, int]]:
        return spans


class CudaTracer(Tracer):
    """Marks are CUDA events with timing on the current stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        super().__init__()

    def mark(self) -> Any:
        if not self.on:
            return 0
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def now(self) -> int:
        torch.cuda.synchronize(self.device)
        return time.monotonic_ns()

    def _nanoseconds(self, spans: list[tuple[int, int, int, Any, Any]]) -> list[tuple[int, int, int, int, int]]:
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record(torch.cuda.current_stream(self.device))
        host = self.now()

        def on_host(mark: Any) -> int:
            return mark if isinstance(mark, int) else host - round(mark.elapsed_time(anchor) * 1e6)

        return [(kind, stage, mb, on_host(start), on_host(end)) for kind, stage, mb, start, end in spans]


def tracer_for(device: torch.device) -> Tracer:
    return CudaTracer(device) if device.type == "cuda" else Tracer()
