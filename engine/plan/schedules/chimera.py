"""Chimera: two pipelines in opposite directions over the same ranks (Li and Hoefler, SC'21, arXiv 2107.06925).

Rank r runs stage r of the pipeline that goes down and stage P-1-r of the one that goes up, so each fills holes of the
other; weights cost double. P micro-batches make a unit, half of them in each direction, and units follow each other.
Where a backward takes as long as a forward the bubble rate is (P-2)/(2M+P-2).
"""

from __future__ import annotations

from engine.plan.actions import Action, Op, Program
from engine.plan.schedules.options import allowed
from engine.plan.schedules.placements import both_ways
from engine.plan.schedules.registry import schedule


def _requires(ranks: int, microbatches: int) -> str | None:
    if ranks % 2:
        return "pipeline.ranks must be even: 2, 4, 6, ..."
    if microbatches % ranks:
        return f"pipeline.microbatches must be a multiple of pipeline.ranks: {allowed(microbatches, ranks, ranks)}"
    return None


@schedule("chimera", "two pipelines in opposite directions, two copies of each stage", requires=_requires)
def chimera(ranks: int, microbatches: int) -> Program:
    """Build Chimera: two pipelines in opposite directions, two copies of each stage.

    P=2, M=4; of each two micro-batches the first enters at rank 0, the second at rank 1:

        rank 0 | 0F0 1F1 1B1 0B0 0F2 1F3 1B3 0B2
        rank 1 | 0F1 1F0 1B0 0B1 0F3 1F2 1B2 0B3

    Each direction is a 1F1B of its own, laid out in slots as long as a forward; the slots of the two never collide.
    """
    direction = [m % ranks // (ranks // 2) for m in range(microbatches)]
    rows = []
    for rank in range(ranks):
        slots = []
        for m, way in enumerate(direction):
            stage = ranks - 1 - rank if way else rank
            begin = 2 * (m % (ranks // 2)) + 2 * ranks * (m // ranks)
            slots.append((begin + stage, Action(stage, Op.F, m)))
            slots.append((begin + 2 * ranks - 1 - stage, Action(stage, Op.B, m)))
        assert len({slot for slot, _ in slots}) == len(slots), "two actions share a slot"
        rows.append([action for _, action in sorted(slots)])
    return Program.of("chimera", both_ways(ranks, direction), microbatches, rows)
