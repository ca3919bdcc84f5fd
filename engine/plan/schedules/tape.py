"""Writing a row by counting: "the next forward of chunk 1" instead of "forward 7 of stage 4".

Most schedules are told that way in their papers: a rank repeats few moves, and each move takes the next micro-batch
of its kind. The tape keeps the counters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.plan.actions import Action, Op, Row


class Tape:
    """The row of one rank, written by counting.

    Chunks are the rank's stages by a local number, 0, 1, ... `stages[chunk]` is the stage, `microbatches[chunk]` the
    micro-batches it sees, ascending. The weight-gradient halves wait in one queue in the order of their input-gradient
    halves.
    """

    def __init__(self, stages: Sequence[int], microbatches: Sequence[range]) -> None:
        self._stages, self._microbatches = stages, microbatches
        self._forwards, self._backwards = [0] * len(stages), [0] * len(stages)
        # Of each chunk, what waits between I and W: its place in the one queue, and its micro-batch.
        self._waiting: list[deque[tuple[int, int]]] = [deque() for _ in stages]
        self._codes: list[int] = []

    def forward(self, chunk: int = 0, fused: bool = False) -> None:
        """Write F of the chunk's next micro-batch; `fused`: overlapped with what is written next."""
        self._write(chunk, Op.F, self._next(chunk, self._forwards), fused)

    def backward(self, chunk: int = 0) -> None:
        """Write the full backward of the chunk's next micro-batch."""
        self._write(chunk, Op.B, self._next(chunk, self._backwards))

    def half(self, chunk: int = 0) -> None:
        """Write I of the chunk's next micro-batch; its W waits from now on."""
        microbatch = self._next(chunk, self._backwards)
        self._write(chunk, Op.I, microbatch)
        self._waiting[chunk].append((len(self._codes), microbatch))

    def weight(self, chunk: int | None = None) -> None:
        """Write the W that has waited longest, of one chunk or of all."""
        owners = [k for k, queue in enumerate(self._waiting) if queue and chunk in (None, k)]
        owner = min(owners, key=lambda k: self._waiting[k][0])
        _, microbatch = self._waiting[owner].popleft()
        self._write(owner, Op.W, microbatch)

    def left(self, chunk: int = 0) -> int:
        """Return how many forwards the chunk has yet to write."""
        return len(self._microbatches[chunk]) - self._forwards[chunk]

    def waiting(self, chunk: int | None = None) -> int:
        """Return how many W wait, of one chunk or of all."""
        return sum(map(len, self._waiting)) if chunk is None else len(self._waiting[chunk])

    def row(self) -> Row:
        """Return what was written, packed."""
        return np.array(self._codes, dtype=np.int64)

    def _next(self, chunk: int, counters: list[int]) -> int:
        counters[chunk] += 1
        return self._microbatches[chunk][counters[chunk] - 1]

    def _write(self, chunk: int, op: Op, microbatch: int, fused: bool = False) -> None:
        self._codes.append(Action(self._stages[chunk], op, microbatch, fused).pack())
