"""Recursive doubling: in step k everybody exchanges all it has with the member whose number differs in bit k.

    N = 4       step 0        step 1
              0 ◄──► 1      0 ◄──► 2
              2 ◄──► 3      1 ◄──► 3          log2 N (α + nβ + nγ)

The fewest steps of all, at the price of bytes: the choice for small tensors. Both partners combine the lower
one's part with the upper one's, so everybody computes the same bits. Other numbers of members than powers of two: see
`power_of_two`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.power_of_two import core_links, through_core
from engine.collectives.ops import ReduceOp
from engine.collectives.peers import mesh, message_pieces, views_like
from engine.transport import Edge, Work


class RecursiveDoubling(Collective):
    """Recursive doubling; needs two buffers of the tensor's size."""

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return the channels that the algorithm sends over, for `Transport.open`."""
        return mesh(members, core_links(len(members)), label)

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        through_core(self.peers, tensor, op, self._double)

    def _double(self, core: list[int], tensor: Tensor, op: ReduceOp) -> None:
        peers, number, cut = self.peers, core.index(self.position), message_pieces(tensor)
        steps = len(core).bit_length() - 1

        def post(step: int) -> list[tuple[Tensor, Work]]:
            if step == steps:
                return []
            buffers = views_like(cut, peers.scratch(("double", step % 2), tensor, len(tensor)))
            return [(buffer, peers.recv(core[number ^ 1 << step], buffer)) for buffer in buffers]

        following = post(0)
        sent = [peers.send(core[number ^ 1], piece) for piece in cut] if steps else []
        for step in range(steps):
            arriving, following, leaving, sent = following, post(step + 1), sent, []
            for piece, (buffer, work), gone in zip(cut, arriving, leaving, strict=True):
                work.wait()
                gone.wait()  # what was sent is about to change
                lower, upper = (buffer, piece) if number >> step & 1 else (piece, buffer)
                op.combine(lower, upper, out=piece)
                if step + 1 < steps:
                    sent.append(peers.send(core[number ^ 2 << step], piece))
