"""DualPipe: micro-batches from both ends at once (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

Half of the micro-batches enter at rank 0, half at rank P-1, so each rank holds two stages, and each stage exists twice:
weights cost double. In the middle a rank always has a forward of one direction and a backward of the other at hand and
runs them as one overlapped pair. P+1 activations are in flight on every rank.
"""

from __future__ import annotations

from engine.plan.actions import Program
from engine.plan.schedules.dual import dual_row
from engine.plan.schedules.options import allowed
from engine.plan.schedules.placements import both_ways
from engine.plan.schedules.registry import schedule


def _requires(ranks: int, microbatches: int) -> str | None:
    if ranks % 2:
        return "pipeline.ranks must be even: 2, 4, 6, ..."
    if microbatches % 2 or microbatches < 2 * ranks:
        choices = allowed(microbatches, 2 * ranks, 2)
        return f"pipeline.microbatches must be even and at least 2 x ranks = {2 * ranks}: {choices}"
    return None


@schedule("dualpipe", "both directions at once, two copies of each stage, overlapped pairs", requires=_requires)
def dualpipe(ranks: int, microbatches: int) -> Program:
    """Build DualPipe: both directions at once, two copies of each stage, overlapped pairs.

    P=2, M=4; micro-batches 0 and 1 enter at rank 0, 2 and 3 at rank 1:

    rank 0 | 0F0 1F2 0F1 1B2 -   1F3&0B0 -   1B3 -   0I1 0W1
    rank 1 | 0F2 1F0 0F3 1B0 -   1F1&0B2 -   1B1 -   0I3 0W3
    """
    half = microbatches // 2
    down, up = range(half), range(half, microbatches)
    rows = []
    for rank in range(ranks):
        mirror = ranks - 1 - rank
        ways = [(rank, down), (mirror, up)]
        if rank >= ranks // 2:
            ways.reverse()
        outer = min(rank, mirror)
        stages, each = zip(*ways, strict=True)
        rows.append(dual_row(stages, each, outer, ranks // 2, alone=outer == ranks // 2 - 1))
    return Program("dualpipe", both_ways(ranks, [0] * half + [1] * half), microbatches, tuple(rows))
