"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965, section 2.3).

The bubble is (P-1)/(M+P-1) for equal stages; all M micro-batches are in flight on every rank.
"""

import numpy as np

from engine.plan.actions import Op, Placement, Program, pack
from engine.plan.schedules.registry import schedule


@schedule("gpipe", "all forwards, then all backwards; M micro-batches in flight")
def gpipe(ranks: int, microbatches: int) -> Program:
    """Build GPipe: all forwards, then all backwards; M micro-batches in flight.

    P=3, M=4, a backward as long as a forward:

        rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    The paper runs the backwards in descending order. The makespan is the same, and in ascending order the gradients
    are added in the order in which every other schedule adds them: bit by bit the same sum.
    """
    order = np.arange(microbatches)
    rows = tuple(np.concatenate([pack(Op.F, rank, order), pack(Op.B, rank, order)]) for rank in range(ranks))
    return Program("gpipe", Placement.linear(ranks), microbatches, rows)
