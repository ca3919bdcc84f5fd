"""1F1B: one forward, one backward in turn, so that few micro-batches are in flight.

PipeDream's steady state (Narayanan et al., SOSP'19) with a flush at the end of the step: PipeDream-Flush
(arXiv 2006.09503, section 3.2), the default of Megatron-LM (SC'21, arXiv 2104.04473, section 2.2.1). The bubble is
GPipe's, (P-1)/(M+P-1) for equal stages; what it saves is memory: min(P-r, M) in flight on rank r instead of M.
"""

import numpy as np

from engine.plan.actions import Op, Placement, Program, Row, pack
from engine.plan.schedules.registry import schedule


@schedule("1f1b", "one forward, one backward in turn; min(P-r, M) micro-batches in flight on rank r")
def one_f_one_b(ranks: int, microbatches: int) -> Program:
    """Build 1F1B: one forward, one backward in turn; min(P-r, M) micro-batches in flight on rank r.

    P=3, M=4, a backward as long as a forward:

        rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
                 warm-up | steady | cool-down

    Warm-up: rank r sends as many forwards ahead as there are ranks behind it, and no more than there are.
    """
    rows = tuple(_row(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks))
    return Program("1f1b", Placement.linear(ranks), microbatches, rows)


def _row(stage: int, warmup: int, microbatches: int) -> Row:
    forwards, backwards = (pack(op, stage, np.arange(microbatches)) for op in (Op.F, Op.B))
    paired = microbatches - warmup
    steady = np.stack([forwards[warmup:], backwards[:paired]], axis=1).reshape(-1)
    return np.concatenate([forwards[:warmup], steady, backwards[paired:]])
