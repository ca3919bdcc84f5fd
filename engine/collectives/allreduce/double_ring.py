"""Two rings in opposite directions, half of the tensor each: both directions of every full-duplex link are used.

    0 ──► 1 ──► 2 ──► 3 ──► 0      first half
    0 ◄── 1 ◄── 2 ◄── 3 ◄── 0      second half          2(N-1) α + (N-1)/N nβ

Two members have one link only, and one ring already uses both of its directions: there it is the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.ring_pass import RingPass, run
from engine.collectives.ops import ReduceOp
from engine.collectives.peers import mesh
from engine.transport import Edge


class DoubleRing(Collective):
    """Each step of one ring is followed by the same step of the other."""

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return the channels that the algorithm sends over, for `Transport.open`."""
        order = range(len(members))
        return mesh(members, [*RingPass.pairs(order), *RingPass.pairs(order[::-1])], label)

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        order = range(self.peers.size)
        there, back = RingPass(self.peers, order, "there"), RingPass(self.peers, order[::-1], "back")
        if self.peers.size == 2:
            run(there.turn(tensor, op, there.all_reduce))
            return
        first, second = tensor.tensor_split(2)
        run(there.turn(first, op, there.all_reduce), back.turn(second, op, back.all_reduce))
