"""Naive model parallelism: one micro-batch at a time, so one rank works at a time.

Every pipeline is judged against it. Its bubble is 1 - 1/P whatever M is, and one micro-batch is in flight.
"""

import numpy as np

from engine.plan.actions import Op, Placement, Program, pack
from engine.plan.schedules.registry import schedule


@schedule("naive", "one micro-batch at a time, one rank at a time")
def naive(ranks: int, microbatches: int) -> Program:
    """Build naive model parallelism: one micro-batch at a time, one rank at a time.

    P=3, M=2, a backward as long as a forward; time goes right, the number is the micro-batch:

        rank 0 | F0 .  .  .  .  B0 F1 .  .  .  .  B1
        rank 1 | .  F0 .  .  B0 .  .  F1 .  .  B1 .
        rank 2 | .  .  F0 B0 .  .  .  .  F1 B1 .  .

    A rank's row is F0 B0 F1 B1 ...; that one micro-batch waits for the other follows from the row of rank 0.
    """
    order = np.repeat(np.arange(microbatches), 2)
    ops = np.tile([Op.F, Op.B], microbatches)
    rows = tuple(pack(ops, rank, order) for rank in range(ranks))
    return Program("naive", Placement.linear(ranks), microbatches, rows)
