"""Evaluation: every micro-batch goes forward, in order, and nothing comes back. Not offered as a training schedule."""

import numpy as np

from engine.plan.actions import Op, Placement, Program, pack
from engine.plan.schedules.registry import schedule


@schedule("forward_only", "evaluation: forwards only", offered=False)
def forward_only(ranks: int, microbatches: int) -> Program:
    """P=3, M=4; time goes right, the number is the micro-batch:

        rank 0 | F0 F1 F2 F3 .  .
        rank 1 | .  F0 F1 F2 F3 .
        rank 2 | .  .  F0 F1 F2 F3

    The same order as a training schedule's forwards, so the runtime needs no second path for evaluation.
    """
    rows = tuple(pack(Op.F, rank, np.arange(microbatches)) for rank in range(ranks))
    return Program("forward_only", Placement.linear(ranks), microbatches, rows)
