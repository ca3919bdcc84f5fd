"""Hanayo: waves, the stages in a zig-zag over the ranks (Liu et al., SC'23, arXiv 2308.15762).

A micro-batch goes down the ranks and up again, once per wave, so no message crosses more than one rank and weights
exist once. With W waves a rank holds 2W chunks. The paper publishes no order in full; here it is that of greedy list
scheduling, backwards first. Where a backward takes as long as a forward and M is a multiple of P, the makespan is
MT+(P-1)T/(2W).
"""

from __future__ import annotations

from engine.plan.actions import Program
from engine.plan.schedules.listing import listed
from engine.plan.schedules.options import at_least
from engine.plan.schedules.placements import zigzag
from engine.plan.schedules.registry import schedule


@schedule("hanayo", "waves: stages in a zig-zag over the ranks, backwards first", requires=at_least("waves", 1))
def hanayo(ranks: int, microbatches: int, *, waves: int = 1) -> Program:
    """Build Hanayo: waves of stages in a zig-zag over the ranks, backwards first.

    P=2, M=4, one wave, two chunks of half a rank's work each:

    rank 0 | 0F0 0F1 0F2 3F0 3B0 3F1 3B1 0B0 0F3 0B1 .   3F2 3B2 3F3 3B3 0B2 .   0B3
    rank 1 | .   1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 1F2 2F2 1F3 2F3 2B2 1B2 2B3 1B3 .
    """
    return listed("hanayo", zigzag(ranks, waves), microbatches)
