"""The eight phases that DualPipe and DualPipeV have in common (DeepSeek-V3, arXiv 2412.19437, figure 5).

Way 0 enters the pipeline at this rank's end, way 1 comes back from the other. With `depth` ranks down to the turn (half
of them in DualPipe, all in DualPipeV) and this one `outer` ranks below the end:

    1  F0                ahead, 2(depth-outer-1)
    2  F0 F1             outer+1
    3  I1 W F1           depth-outer-1
    4  F0&B1 F1&B0       the rest: overlapped pairs
    5  B1 F1&B0          depth-outer-1
    6  B1 B0             outer+1; the last outer+1 of these backwards leave W for later
    7  W I0              depth-outer-1
    8  W                 outer+1
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.actions import Row
from engine.plan.schedules.tape import Tape


def dual_row(stages: Sequence[int], microbatches: Sequence[range], outer: int, depth: int, alone: bool) -> Row:
    """Return the row of a rank with the stages of ways 0 and 1.

    `alone`: at the turn, where the first pair is not overlapped. (What the first backward there needs is made by the
    forward it would overlap.)
    """
    tape = Tape(stages, microbatches)
    inner = depth - outer - 1
    for _ in range(2 * inner):
        tape.forward(0)
    for _ in range(outer + 1):
        tape.forward(0)
        tape.forward(1)
    for _ in range(inner):
        tape.half(1)
        tape.weight()
        tape.forward(1)
    for k in range(tape.left(0)):
        _pair(tape, 0, 1, fused=not (alone and k == 0))
        _pair(tape, 1, 0)
    for _ in range(inner):
        tape.backward(1)
        _pair(tape, 1, 0)
    for k in range(2 * (outer + 1)):
        way = 1 - k % 2
        (tape.backward if k <= outer else tape.half)(way)
    for _ in range(inner):
        tape.weight()
        tape.half(0)
    for _ in range(outer + 1):
        tape.weight()
    return tape.row()


def _pair(tape: Tape, forward: int, backward: int, fused: bool = True) -> None:
    tape.forward(forward, fused)
    tape.backward(backward)
