"""ZB-H2: no bubble within a rank's own time, for twice the memory (Qi et al., arXiv 2401.10241).

As ZB-H1, but with nearly twice the forwards before the first backward, which fill the hole in front of it, and with W
put off until the holes at the end. For M >= 2P-1 the bubble is (P-1)(F+I-2W): none for equal parts. Ranks start and end
askew: each is busy throughout, at another time; the next step's forwards would have to start before this step ends.
"""

from __future__ import annotations

from engine.plan.actions import Placement, Program
from engine.plan.schedules.registry import schedule
from engine.plan.schedules.zb_h1 import delayed_row


@schedule("zb_h2", "ZB-H1 with 2P-1 activations on every rank; no bubble where F, I and W take equally long")
def zb_h2(ranks: int, microbatches: int) -> Program:
    """Build ZB-H2: ZB-H1 with 2P-1 activations on every rank; no bubble where F, I and W take equally long.

    P=3, M=5:

    rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
    rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
    rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    rows = tuple(
        delayed_row(rank, min(2 * (ranks - rank) - 1, microbatches), 2 * rank, microbatches) for rank in range(ranks)
    )
    return Program("zb_h2", Placement.linear(ranks), microbatches, rows)
