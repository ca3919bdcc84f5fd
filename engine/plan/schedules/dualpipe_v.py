"""DualPipeV: DualPipe cut in half and folded to a V (the DualPipe repository's second schedule).

A rank's two stages are stage r and stage 2P-1-r of one V instead of two copies' stages: the same order of moves without
a second copy of the weights. 2P+1 chunks are in flight on every rank.
"""

from __future__ import annotations

from engine.plan.actions import Program
from engine.plan.schedules.dual import dual_row
from engine.plan.schedules.options import allowed
from engine.plan.schedules.placements import vee
from engine.plan.schedules.registry import schedule


def _requires(ranks: int, microbatches: int) -> str | None:
    if microbatches < 2 * ranks:
        choices = allowed(microbatches, 2 * ranks, 1)
        return f"pipeline.microbatches must be at least 2 x ranks = {2 * ranks}: {choices}"
    return None


@schedule(
    "dualpipe_v", "DualPipe folded to a V: overlapped pairs without a second copy of the weights", requires=_requires
)
def dualpipe_v(ranks: int, microbatches: int) -> Program:
    """Build DualPipeV: DualPipe folded to a V: overlapped pairs without a second copy of the weights.

    P=2, M=4, two chunks of half a rank's work each:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 -   .   3F2&0B0 -   3B2 -   .   3F3&0B1 -   3B3 -   0I2 0W2 0I3 0W3
    rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 -   2F2&1B0 -   1F3&2B1 -   2F3&1B1 -   2B2 -   1B2 -   .   2I3 1I3 2W3 1W3
    """
    rows = []
    for rank in range(ranks):
        stages = (rank, 2 * ranks - 1 - rank)
        rows.append(dual_row(stages, [range(microbatches)] * 2, rank, ranks, alone=rank == ranks - 1))
    return Program("dualpipe_v", vee(ranks), microbatches, tuple(rows))
