"""Evaluation: every micro-batch goes forward, and nothing comes back. Not offered as a training schedule."""

from engine.plan.actions import Placement, Program
from engine.plan.schedules.listing import listed
from engine.plan.schedules.registry import schedule


@schedule("forward_only", "evaluation: forwards only", offered=False)
def forward_only(ranks: int, microbatches: int) -> Program:
    """Build an evaluation: forwards only.

    P=3, M=4; time goes right, the number is the micro-batch:

        rank 0 | F0 F1 F2 F3 .  .
        rank 1 | .  F0 F1 F2 F3 .
        rank 2 | .  .  F0 F1 F2 F3

    The same order as a training schedule's forwards, so the runtime needs no second path for evaluation.
    """
    return evaluation(Placement.linear(ranks), microbatches)


def evaluation(placement: Placement, microbatches: int) -> Program:
    """Build forwards only where the stages of a training schedule lie; of two copies the first is used.

    The deepest stage goes first, so that a rank with several chunks takes in a message before it sends many: channels
    over which nothing comes back hold few.
    """
    one_way = Placement(placement.ranks, placement.rank_of[:1])
    return listed("forward_only", one_way, microbatches, backward=False)
