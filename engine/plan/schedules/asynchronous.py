"""1F1B that is never flushed: each stage updates its weights after the last backward of an update, and goes on.

    rank 0 | F0 F1 F2 B0 STEP0 F3 B1 STEP1 F4 B2 STEP2 ...
    rank 1 |    F0 F1 B0 STEP0 F2 B1 STEP1 F3 B2 STEP2 ...
    rank 2 |       F0 B0 STEP0 F1 B1 STEP1 F2 B2 STEP2 ...

What the asynchronous schedules share: the order. They differ in which weights a micro-batch reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.plan.actions import Op, Program, pack, unpack
from engine.plan.schedules.one_f_one_b import one_f_one_b


def unflushed(name: str, ranks: int, updates: Sequence[int]) -> Program:
    """Build the 1F1B program of all micro-batches, `updates[k]` of them (1 or more) in the k-th update."""
    lasts = np.cumsum(np.asarray(updates, dtype=np.int64)) - 1
    plain = one_f_one_b(ranks, int(lasts[-1]) + 1)
    rows = []
    for stage, row in enumerate(plain.rows):
        fields = unpack(row)
        ends = np.flatnonzero((fields.op == Op.B) & np.isin(fields.microbatch, lasts))
        rows.append(np.insert(row, ends + 1, pack(Op.STEP, stage, lasts)))
    return Program(name, plain.placement, plain.microbatches, tuple(rows))
