"""ZB-V: no bubble with the memory of 1F1B, on a V (Qi et al., arXiv 2401.10241).

Rank r holds stage r and stage 2P-1-r. A micro-batch goes down the ranks and up again, so the rank that runs its first
forward also runs its first backward, and no rank keeps activations longer than another: 2P chunks, as much as P whole
stages. For M >= 2P-1 the bubble is (P-1)(I-W), where W is no longer than F and F no longer than I.
"""

from __future__ import annotations

from engine.plan.actions import Program, Row, unpack
from engine.plan.schedules.placements import vee
from engine.plan.schedules.registry import schedule
from engine.plan.schedules.tape import Tape


@schedule("zb_v", "split backwards on a V; no bubble where F, I and W take equally long, with 1F1B's memory")
def zb_v(ranks: int, microbatches: int) -> Program:
    """Build ZB-V: split backwards on a V; no bubble where F, I and W take equally long, with 1F1B's memory.

    P=2, M=3, two chunks of half a rank's work each:

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    With fewer than 2P-1 micro-batches it is the program of 2P-1 without those that are not there.
    """
    whole = max(microbatches, 2 * ranks - 1)
    rows = (_row(rank, ranks, whole) for rank in range(ranks))
    kept = tuple(row[unpack(row).microbatch < microbatches] for row in rows)
    return Program("zb_v", vee(ranks), microbatches, kept)


def _row(rank: int, ranks: int, microbatches: int) -> Row:
    tape = Tape([rank, 2 * ranks - 1 - rank], [range(microbatches)] * 2)
    below = ranks - rank
    for _ in range(2 * below - 1):
        tape.forward(0)
    for _ in range(rank):
        tape.forward(1)
        tape.forward(0)
    for _ in range(below):
        _turn(tape)
    while tape.left(1):
        if tape.left(0):
            tape.forward(0)
        tape.half(0)
        tape.weight(0)
        _turn(tape)
    for _ in range(rank):
        tape.half(0)
        tape.half(1)
    for _ in range(below):
        tape.half(0)
        tape.weight(0)
    for chunk in (1, 0):
        while tape.waiting(chunk):
            tape.weight(chunk)
    return tape.row()


def _turn(tape: Tape) -> None:
    """A micro-batch through the second chunk, there and back."""
    tape.forward(1)
    tape.half(1)
    tape.weight(1)
