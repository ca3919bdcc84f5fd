"""Spans and timelines: one type for simulated and for measured time.

A span is something that occupied a rank from `start` to `end`. Simulated timelines carry float64 in the unit of the
costs; measured ones carry int64 nanoseconds of one clock (CLOCK_MONOTONIC on a host).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Kind(IntEnum):
    """What a span is. The first eleven values equal `Op`'s."""

    F = 0
    B = 1
    I = 2  # noqa: E741
    W = 3
    SEND_F = 4  # start: the send was issued; end: the call returned (the transfer itself goes on behind it)
    RECV_F = 5  # start: the receive was posted; end: the call returned
    SEND_B = 6
    RECV_B = 7
    REDUCE = 8  # of a bucket of a stage's gradients, over its copies; in the background: may overlap others
    STEP = 9  # clip, optimizer step, zeroing: the account's "optimizer"
    GATHER = 10  # of a stage's parameters from those that updated them; in the background, recorded where it is awaited
    WAIT_F = 16  # waiting for the activation that F(stage, microbatch) needs
    WAIT_B = 17  # waiting for the gradient that B or I (stage, microbatch) needs
    WAIT_REDUCE = 18  # waiting at STEP for a stage's reduction
    WAIT_NORM = 19  # waiting at STEP for the other ranks' gradient norms
    WAIT_DATA = 20  # waiting for the loader, or for a batch's copy to the device
    WAIT_COUNT = 21  # waiting for what the other last ranks counted, before the first backward
    WAIT_GATHER = 23  # waiting before a stage's first forward for its parameters
    QUEUED = 22  # start: a bucket's last gradient was there; end: its reduction began; in the background


COMPUTE_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
BEHIND = (Kind.REDUCE, Kind.GATHER)  # in the background, by a thread of their own


class Span(NamedTuple):
    """One span: what occupied `rank` from `start` to `end`; stage and micro-batch are -1 where there is none."""

    rank: int
    kind: Kind
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans of one step as parallel arrays of length n, and one window [start, end] per rank.

    `rank, kind, stage, microbatch`: int32. `start, end`: float64 (simulated) or int64 nanoseconds (measured).
    `windows`: shape [ranks, 2], same dtype as start. Ranks count over replicas: replica * P + pipeline rank.
    `pairs`: int64 [k, 2], the indices of the two computations of each overlapped pair: one visible action.
    """

    rank: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int32]
    stage: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    start: npt.NDArray[Any]
    end: npt.NDArray[Any]
    windows: npt.NDArray[Any]
    pairs: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    @property
    def ranks(self) -> int:
        """How many ranks there are, over all replicas."""
        return len(self.windows)

    def first(self, ranks: int) -> Timeline:
        """The part of the first so many ranks; itself where it has no more."""
        if ranks >= self.ranks:
            return self
        kept = self.rank < ranks
        pairs = self.pairs[kept[self.pairs[:, 0]]]  # both of a pair are on one rank
        return Timeline(
            self.rank[kept],
            self.kind[kept],
            self.stage[kept],
            self.microbatch[kept],
            self.start[kept],
            self.end[kept],
            self.windows[:ranks],
            (np.cumsum(kept) - 1)[pairs],
        )

    def __len__(self) -> int:
        return len(self.kind)

    def __iter__(self) -> Iterator[Span]:
        columns = zip(self.rank, self.kind, self.stage, self.microbatch, self.start, self.end, strict=True)
        return (Span(int(r), Kind(int(k)), int(s), int(m), a.item(), b.item()) for r, k, s, m, a, b in columns)

    @classmethod
    def of(cls, spans: Sequence[Span], windows: Sequence[Sequence[float]], measured: bool = False) -> Timeline:
        """Build from Span tuples; `measured` selects int64 nanoseconds."""
        time = np.int64 if measured else np.float64
        columns = list(zip(*spans, strict=True)) if spans else [()] * 6
        rank, kind, stage, microbatch = (np.array(c, dtype=np.int32) for c in columns[:4])
        start, end = (np.array(c, dtype=time) for c in columns[4:])
        return cls(rank, kind, stage, microbatch, start, end, np.array(windows, dtype=time).reshape(-1, 2))
