"""Looped breadth first: GPipe over several chunks per rank (Lamy-Poirier, arXiv 2211.05953).

All micro-batches go through a rank's first chunk, then all through the next; backwards the other way. So a stage's
gradients are complete early and its weights are needed in one piece of time only, which suits sharded weights. The
bubble of GPipe is divided by the number of chunks; M micro-batches are in flight on every stage.
"""

from __future__ import annotations

import numpy as np

from engine.plan.actions import Op, Program, pack
from engine.plan.schedules.options import at_least
from engine.plan.schedules.placements import round_robin
from engine.plan.schedules.registry import schedule


@schedule(
    "looped_bfs", "GPipe over v chunks per rank, breadth first; Mv chunks in flight", requires=at_least("chunks", 1)
)
def looped_bfs(ranks: int, microbatches: int, *, chunks: int = 2) -> Program:
    """Build looped breadth first: GPipe over v chunks per rank, breadth first; Mv chunks in flight.

    P=2, M=4, two chunks of half a rank's work each:

        rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   2B0 2B1 2B2 2B3 0B0 0B1 0B2 0B3
        rank 1 | .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3 .

    PyTorch's order runs the backwards of a chunk in descending order of micro-batches. Ascending has the same makespan
    and adds the gradients as every other schedule here does.
    """
    order = np.tile(np.arange(microbatches), chunks)
    rows = []
    for rank in range(ranks):
        stages = np.repeat(np.arange(chunks) * ranks + rank, microbatches)
        rows.append(np.concatenate([pack(Op.F, stages, order), pack(Op.B, stages[::-1], order)]))
    return Program("looped_bfs", round_robin(ranks, chunks), microbatches, tuple(rows))
