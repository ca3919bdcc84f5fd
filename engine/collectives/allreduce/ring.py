"""Ring all-reduce: reduce-scatter, then all-gather, N-1 steps each (Patarasuk & Yuan 2009, JPDC 69(2)).

    2(N-1) α + 2(N-1)/N nβ + (N-1)/N nγ          2(N-1)/N n bytes sent per rank: as few as possible

How it goes round is drawn in `ring_pass`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.ring_pass import RingPass, run
from engine.collectives.ops import ReduceOp
from engine.collectives.peers import mesh
from engine.transport import Edge


class Ring(Collective):
    """One ring over the members in their order."""

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return the channels that the algorithm sends over, for `Transport.open`."""
        return mesh(members, RingPass.pairs(range(len(members))), label)

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        ring = RingPass(self.peers, range(self.peers.size))
        run(ring.turn(tensor, op, ring.all_reduce))

    def mean(self, tensor: Tensor, counts: Sequence[int]) -> None:
        """Replace everybody's part by the mean over all of them, weighed by `counts`, in place.

        Each part is the mean of so many (`counts`, by position; 0: of none). Partial means travel, not sums, so half
        precision keeps its range and its bytes.
        """
        if len(self.members) > 1 and tensor.numel():
            with torch.no_grad():
                ring = RingPass(self.peers, range(self.peers.size))
                run(ring.turn(tensor, ReduceOp.MEAN, ring.all_reduce, counts))
