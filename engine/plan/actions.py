"""The vocabulary of a schedule: Op, Action, Placement, Program.

A program is, for each pipeline rank, an ordered list of actions. It is kept as one packed int64 per action in a
numpy array per rank, so that a program of millions of actions is cheap; an `Action` is a readable view of one entry.

    bit 63..56   55     54..32   31..0
    op           fused  stage    micro-batch + 1   (0: the action has no micro-batch)

Actions print as torch.distributed.pipelining prints them: `2F0` is stage 2, forward, micro-batch 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.int64]


class Op(IntEnum):
    """What an action does: F forward, B full backward, I its input-gradient half, W its weight-gradient half.

    B = I then W. GATHER: the members of a stage exchange the parameters that each has updated, where the optimizer is
    divided.
    """

    F = 0
    B = 1
    I = 2  # noqa: E741
    W = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    REDUCE = 8
    STEP = 9
    GATHER = 10


COMPUTE = (Op.F, Op.B, Op.I, Op.W)
SENDS = (Op.SEND_F, Op.SEND_B)
RECVS = (Op.RECV_F, Op.RECV_B)
NAMES = tuple("REDUCE_GRAD" if op is Op.REDUCE else op.name for op in Op)  # as torch writes them, by number
NO_MICROBATCH = -1
_FUSED = 1 << 55


class Action(NamedTuple):
    """One entry of a program.

    `microbatch` is -1 where there is none (REDUCE, GATHER, a synchronous STEP). `fused` marks the first of an
    overlapped pair: it and the next action of its row are one visible action.
    """

    stage: int
    op: Op
    microbatch: int = NO_MICROBATCH
    fused: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{NAMES[self.op]}{self.microbatch if self.microbatch >= 0 else ''}"

    def pack(self) -> int:
        """Return the action as one integer: op, fused, stage and micro-batch in bits 56, 55, 32 and 0 upwards."""
        return (self.op << 56) | (_FUSED * self.fused) | (self.stage << 32) | (self.microbatch + 1)

    @classmethod
    def unpack(cls, code: int) -> Action:
        """Return the action that `pack` made the integer from."""
        code = int(code)
        return cls(
            stage=(code >> 32) & 0x7FFFFF,
            op=Op(code >> 56),
            microbatch=(code & 0xFFFFFFFF) - 1,
            fused=bool((code >> 55) & 1),
        )


def pack(op: npt.ArrayLike, stage: npt.ArrayLike, microbatch: npt.ArrayLike) -> Row:
    """Pack many actions at once; the arguments broadcast against each other, and none of the actions is fused."""
    op, stage, microbatch = (np.asarray(a, dtype=np.int64) for a in (op, stage, microbatch))
    packed: Row = (op << 56) | (stage << 32) | (microbatch + 1)
    return packed


class Fields(NamedTuple):
    """Many actions taken apart: parallel arrays, int64 and bool."""

    op: Row
    stage: Row
    microbatch: Row
    fused: npt.NDArray[np.bool_]


def unpack(row: Row) -> Fields:
    """Take packed actions apart, `fused` included."""
    return Fields(row >> 56, (row >> 32) & 0x7FFFFF, (row & 0xFFFFFFFF) - 1, (row & _FUSED) != 0)


@dataclass(frozen=True)
class Placement:
    """Which rank runs a stage: `rank_of[direction][stage]`.

    `direction[microbatch]` is given only where stages have copies and there are two directions (DualPipe, Chimera).
    """

    ranks: int
    rank_of: tuple[tuple[int, ...], ...]
    direction: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """S, the number of distinct stages."""
        return len(self.rank_of[0])

    @property
    def copies(self) -> int:
        """Number of ranks that hold each stage: 1, or 2 where there are two directions."""
        return len(self.rank_of)

    def rank(self, stage: int, microbatch: int = NO_MICROBATCH) -> int:
        """Return the rank that runs a stage for a micro-batch."""
        way = self.direction[microbatch] if self.direction and microbatch >= 0 else 0
        return self.rank_of[way][stage]

    def rank_table(self, microbatches: int) -> Row:
        """Return which rank runs (stage, micro-batch): shape [S, M]."""
        way = np.array(self.direction[:microbatches] or [0] * microbatches, dtype=np.int64)
        return np.array(self.rank_of, dtype=np.int64)[way].T

    @property
    def homes(self) -> list[tuple[int, int]]:
        """Sorted (rank, stage) of every copy of every stage."""
        return sorted({(rank, stage) for way in self.rank_of for stage, rank in enumerate(way)})

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that live on `rank`, ascending, each once."""
        return sorted({s for way in self.rank_of for s, r in enumerate(way) if r == rank})

    def first_copies(self, rank: int) -> list[int]:
        """Return the stages whose first copy lives on `rank`, ascending: a stage is counted and evaluated there."""
        return [stage for stage, home in enumerate(self.rank_of[0]) if home == rank]

    def ranks_of(self, stage: int) -> list[int]:
        """Return the ranks that hold a copy of a stage, ascending."""
        return sorted({way[stage] for way in self.rank_of})

    @classmethod
    def linear(cls, ranks: int) -> Placement:
        """Place stage s on rank s."""
        return cls(ranks, (tuple(range(ranks)),))


@dataclass(frozen=True, eq=False)
class Program:  # noqa: PLW1641 (its arrays do not hash, so it does not either)
    """For each rank a row of packed actions, in the order in which the rank executes them.

    `versions`, only for an asynchronous program, and only where a forward does not simply read the newest weights:
    after how many updates of the program (stage, micro-batch) reads them, forward and backward alike: shape [S, M].
    """

    name: str
    placement: Placement
    microbatches: int
    rows: tuple[Row, ...]
    versions: Row | None = None

    @property
    def ranks(self) -> int:
        """P, the number of rows."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """S, the number of distinct stages."""
        return self.placement.stages

    @property
    def asynchronous(self) -> bool:
        """Whether stages update their weights while micro-batches are in flight: a STEP names a micro-batch."""
        return any((((row >> 56) == Op.STEP) & ((row & 0xFFFFFFFF) > 0)).any() for row in self.rows)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank in the order of execution."""
        return (Action.unpack(code) for code in self.rows[rank])

    def __len__(self) -> int:
        return sum(len(row) for row in self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        same = (self.name, self.placement, self.microbatches) == (other.name, other.placement, other.microbatches)
        same = same and len(self.rows) == len(other.rows) and all(map(np.array_equal, self.rows, other.rows))
        return same and np.array_equal(_some(self.versions), _some(other.versions))

    @classmethod
    def of(cls, name: str, placement: Placement, microbatches: int, rows: Sequence[Sequence[Action]]) -> Program:
        """Pack rows of actions."""
        packed = tuple(np.array([a.pack() for a in row], dtype=np.int64) for row in rows)
        return cls(name, placement, microbatches, packed)


def _some(table: Row | None) -> Row:
    return np.empty(0, dtype=np.int64) if table is None else table
