"""Interleaved 1F1B: each rank holds several chunks, and 1F1B runs over the chunks (Megatron-LM, SC'21, section 2.2.2).

With v chunks per rank the bubble of 1F1B is divided by v, and the number of messages multiplied by it. Micro-batches
go in rounds: a rank runs its first chunk for every micro-batch of a round, then the next chunk, and so on. For equal
stages and M a multiple of P the bubble is (P-1)T/v and min(2(P-1-r)+(v-1)P+1, Mv) chunks are in flight on rank r.
"""

from __future__ import annotations

import numpy as np

from engine.plan.actions import Op, Program, Row, pack
from engine.plan.schedules.options import at_least
from engine.plan.schedules.placements import round_robin
from engine.plan.schedules.registry import schedule


@schedule(
    "interleaved_1f1b",
    "1F1B over v chunks per rank; the bubble of 1F1B divided by v",
    requires=at_least("chunks", 1),
)
def interleaved_1f1b(ranks: int, microbatches: int, *, chunks: int = 2) -> Program:
    """Build interleaved 1F1B: 1F1B over v chunks per rank; the bubble of 1F1B divided by v.

    P=2, M=4, two chunks of half a rank's work each:

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    The paper wants M to be a multiple of P: rounds of P micro-batches. Here there are max(1, M//P) rounds, as even as
    can be; where M is a multiple of P, or splits evenly, that is PyTorch's order too.
    """
    rounds = np.array_split(np.arange(microbatches), max(1, microbatches // ranks))
    rows = tuple(_row(rank, ranks, chunks, rounds) for rank in range(ranks))
    return Program("interleaved_1f1b", round_robin(ranks, chunks), microbatches, rows)


def _row(rank: int, ranks: int, chunks: int, rounds: list[Row]) -> Row:
    stages = np.arange(chunks) * ranks + rank
    forwards = np.concatenate([_round(Op.F, stages, part) for part in rounds])
    backwards = np.concatenate([_round(Op.B, stages[::-1], part) for part in rounds])
    warmup = min(2 * (ranks - 1 - rank) + (chunks - 1) * len(rounds[0]), len(forwards))
    paired = len(forwards) - warmup
    steady = np.stack([forwards[warmup:], backwards[:paired]], axis=1).reshape(-1)
    return np.concatenate([forwards[:warmup], steady, backwards[paired:]])


def _round(op: Op, stages: Row, microbatches: Row) -> Row:
    """One chunk after the other, each over the round's micro-batches."""
    return pack(op, np.repeat(stages, len(microbatches)), np.tile(microbatches, len(stages)))
