"""V-Half: half of 1F1B's memory for less than half of its bubble (Qi et al., arXiv 2405.15362)."""

from __future__ import annotations

from engine.plan.actions import Program
from engine.plan.schedules.building_block import build_from
from engine.plan.schedules.registry import schedule


@schedule("v_half", "split backwards on a V, with half of 1F1B's memory and half of its bubble")
def v_half(ranks: int, microbatches: int) -> Program:
    """Build V-Half: split backwards on a V, with half of 1F1B's memory and half of its bubble.

    P=2, M=3, two chunks of half a rank's work each:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1I0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    return build_from("v_half", _block, ranks, microbatches)


def _block(ranks: int, rank: int) -> tuple[int, int, int, int]:
    gap = 0 if ranks % 2 else 3  # else forwards and backwards would want the same slots
    return 2 * rank, 3 * ranks - 2 - rank, 3 * ranks + gap + 2 * rank - 1, 6 * ranks + gap - 2 - rank
