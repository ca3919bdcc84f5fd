"""The one rule of what an action waits for, used by verification and by simulation alike.

    F(s, m)      waits for F(s-1, m)                      the activation
    B, I(s, m)   waits for F(s, m) and B or I(s+1, m)     its own forward, and the gradient
    W(s, m)      waits for I(s, m)
    SEND(s, m)   waits for the action that made what it sends

What the first of an overlapped pair made leaves its rank when the pair ends. Every action also waits for the one
before it in its row. In a lowered program an action whose neighbour stage lives on another rank waits for the message
instead: the SEND over there is reached, and its own RECV is posted in its row. A SEND never blocks its rank, and
neither does a RECV.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.plan.actions import Action, Op, Program, Row, unpack

Mask = npt.NDArray[np.bool_]
NONE = -1


class Flat:
    """All actions of a program as one sequence, rank after rank, so that an action is an index.

    `rank, op, stage, microbatch`: shape [n]. Rank r holds the indices offsets[r] .. offsets[r+1]-1.
    """

    def __init__(self, program: Program) -> None:
        lengths = [len(row) for row in program.rows]
        self.program = program
        self.codes: Row = np.concatenate([*program.rows, np.empty(0, dtype=np.int64)])
        self.offsets: Row = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.rank: Row = np.repeat(np.arange(program.ranks), lengths)
        self.op, self.stage, self.microbatch, self.fused = unpack(self.codes)

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def home(self) -> Row:
        """Rank on which (stage, micro-batch) is placed: shape [S, M]."""
        return self.program.placement.rank_table(self.program.microbatches)

    @cached_property
    def lowered(self) -> bool:
        """Whether the program lists its communication."""
        return bool(self.having(Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B).any())

    def having(self, *ops: Op) -> Mask:
        """Return which actions are one of `ops`: shape [n]."""
        mask: Mask = np.isin(self.op, ops) if len(ops) > 1 else self.op == ops[0]
        return mask

    def find(self, *ops: Op) -> Row:
        """Return the index of the action of (stage, micro-batch) that is one of `ops`, or -1: shape [S, M]."""
        table = np.full((self.program.stages, self.program.microbatches), NONE, dtype=np.int64)
        indices = np.flatnonzero(self.having(*ops))
        table[self.stage[indices], self.microbatch[indices]] = indices
        return table

    def last(self, *ops: Op) -> dict[tuple[int, int], int]:
        """Return (rank, stage) -> the index of the last action that is one of `ops`, where there is one."""
        indices = np.flatnonzero(self.having(*ops))[::-1]
        places = self.rank[indices] * self.program.stages + self.stage[indices]
        keys, at = np.unique(places, return_index=True)
        pairs = zip(keys.tolist(), indices[at].tolist(), strict=True)
        return {divmod(key, self.program.stages): index for key, index in pairs}

    def action(self, index: int) -> Action:
        """Return the action of an index."""
        return Action.unpack(int(self.codes[index]))

    def position(self, index: int) -> tuple[int, int]:
        """Return (rank, index in its row) of an action."""
        rank = int(self.rank[index])
        return rank, int(index - self.offsets[rank])


@dataclass(frozen=True, eq=False)
class Dependencies:
    """For each action the index of what it waits for, -1 where nothing: shape [n] each.

    `own`: an action of the same stage, on the same rank. `posted`: the RECV of its message, on the same rank.
    `neighbour`: the neighbour stage's action, or its SEND where the program is lowered and it is on another rank.
    """

    own: Row
    posted: Row
    neighbour: Row


class _Way(NamedTuple):
    """One of the two ways through the pipeline: which actions wait (`users`), for which stage, and by what message."""

    users: tuple[Op, ...]
    step: int  # the neighbour it waits for is stage + step
    send: Op
    recv: Op


_WAYS = (_Way((Op.F,), -1, Op.SEND_F, Op.RECV_F), _Way((Op.B, Op.I), 1, Op.SEND_B, Op.RECV_B))


def dependencies(flat: Flat) -> Dependencies:
    """Return what each action waits for besides the action before it.

    Expects stages and micro-batches in range.
    """
    own, posted, neighbour = (np.full(len(flat), NONE, dtype=np.int64) for _ in range(3))
    for made, users in (
        (flat.find(Op.F), (Op.B, Op.I, Op.SEND_F)),
        (flat.find(Op.B, Op.I), (Op.SEND_B,)),
        (flat.find(Op.I), (Op.W,)),
    ):
        at = np.flatnonzero(flat.having(*users))
        own[at] = made[flat.stage[at], flat.microbatch[at]]
    for way in _WAYS:
        source = flat.find(*way.users)
        if flat.lowered:
            sent = flat.find(way.send)
            source = np.where(sent >= 0, sent, source)
        beyond = 0 if way.step < 0 else flat.program.stages - 1
        at = np.flatnonzero(flat.having(*way.users) & (flat.stage != beyond))
        neighbour[at] = source[flat.stage[at] + way.step, flat.microbatch[at]]
        posted[at] = flat.find(way.recv)[flat.stage[at], flat.microbatch[at]]
    neighbour += (neighbour >= 0) & flat.fused[neighbour] & (flat.rank[neighbour] != flat.rank)
    return Dependencies(own, posted, neighbour)


class ExecutionTimes(NamedTuple):
    """When the actions of a program run, and how far each rank gets.

    `start, end`: float64 [n], -1 where never reached. `heads`: the action at which each rank stands, offsets[r+1] where
    it is through: shape [P].
    """

    start: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]
    heads: Row


def progress(
    offsets: Row, neighbour: Row, duration: npt.NDArray[np.float64], delay: npt.NDArray[np.float64]
) -> ExecutionTimes:
    """Run rows on paper: each action as early as the one before it in its row and its neighbour allow.

    Row r holds the actions offsets[r] .. offsets[r+1]-1. `neighbour`: the action of another row that each one waits
    for, or -1; `duration`: how long it takes; `delay`: what its neighbour's message takes on its way: shape [n] each.
    One visit per action and one per wait, so linear in the number of actions. (`own` and `posted` need no look here:
    they lie in the same row, and verification has seen that they come first.)
    """
    size, bounds = len(neighbour), offsets.tolist()
    sources, lasts, delays = neighbour.tolist(), duration.tolist(), delay.tolist()
    start, end = [-1.0] * size, [-1.0] * size
    heads, clocks = bounds[:-1], [0.0] * (len(bounds) - 1)
    sleepers: dict[int, list[int]] = {}  # action -> the rows that wait for it
    ready = list(range(len(heads)))
    while ready:
        rank = ready.pop()
        clock, last = clocks[rank], bounds[rank + 1]
        at = heads[rank]
        while at < last:
            source = sources[at]
            if source >= 0:
                arrival = end[source]
                if arrival < 0:
                    sleepers.setdefault(source, []).append(rank)
                    break
                arrival += delays[at]
                if arrival > clock:
                    clock = arrival
            start[at] = clock
            clock += lasts[at]
            end[at] = clock
            if at in sleepers:
                ready += sleepers.pop(at)
            at += 1
        heads[rank], clocks[rank] = at, clock
    return ExecutionTimes(np.array(start), np.array(end), np.array(heads, dtype=np.int64))
