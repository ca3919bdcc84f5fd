"""V-Min: a third of 1F1B's memory, the least that a V can do with (Qi et al., arXiv 2405.15362)."""

from __future__ import annotations

from engine.plan.actions import Program
from engine.plan.schedules.building_block import build_from
from engine.plan.schedules.registry import schedule


@schedule("v_min", "split backwards on a V, with a third of 1F1B's memory and two thirds of its bubble")
def v_min(ranks: int, microbatches: int) -> Program:
    """Build V-Min: split backwards on a V, with a third of 1F1B's memory and two thirds of its bubble.

    P=2, M=3, two chunks of half a rank's work each:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 .   0I2 0W2
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2I1 1I1 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """
    return build_from("v_min", _block, ranks, microbatches)


def _block(ranks: int, rank: int) -> tuple[int, int, int, int]:
    gap = 2 if ranks % 3 == 0 else 0  # else forwards and backwards would want the same slots
    return rank, 2 * ranks - 1 - rank, 2 * ranks + gap + rank, 4 * ranks + gap - 1 - rank
