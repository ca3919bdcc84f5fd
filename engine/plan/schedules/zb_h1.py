"""ZB-H1: 1F1B with the backward cut in two, and weight gradients in the holes (Qi et al., arXiv 2401.10241).

Only the input gradient is waited for by another rank. So a rank sends it off first and does the weight gradient later,
where 1F1B would idle. Where W is no longer than F and I, and M >= P, the bubble is (P-1)(F+I-W) and the memory that of
1F1B's first rank: P-r activations in flight on rank r, and r more that wait for their W.
"""

from __future__ import annotations

from engine.plan.actions import Placement, Program, Row
from engine.plan.schedules.registry import schedule
from engine.plan.schedules.tape import Tape


@schedule("zb_h1", "1F1B with delayed weight gradients; a third of its bubble, P activations on every rank")
def zb_h1(ranks: int, microbatches: int) -> Program:
    """Build ZB-H1: 1F1B with delayed weight gradients; a third of its bubble, P activations on every rank.

    P=3, M=4:

        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r puts W off by r micro-batches: what it may keep beyond its own P-r, up to the P of rank 0.
    """
    rows = tuple(delayed_row(rank, min(ranks - rank, microbatches), rank, microbatches) for rank in range(ranks))
    return Program("zb_h1", Placement.linear(ranks), microbatches, rows)


def delayed_row(stage: int, warmup: int, lag: int, microbatches: int) -> Row:
    """Write `warmup` F, then I, the W of `lag` micro-batches before, and the next F in turn, then what W is left."""
    tape = Tape([stage], [range(microbatches)])
    for _ in range(warmup):
        tape.forward()
    for k in range(microbatches):
        tape.half()
        if k >= lag:
            tape.weight()
        if tape.left():
            tape.forward()
    while tape.waiting():
        tape.weight()
    return tape.row()
