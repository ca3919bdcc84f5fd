"""Recursive halving, then recursive doubling (Rabenseifner 2004): a ring's bytes in a hypercube's number of steps.

    halving     exchange halves with the member at distance N/2, keep one and combine; then quarters at N/4, ...
    doubling    the same exchanges backwards, now of finished parts

    N = 4, member 0 keeps    0123 ──► 01.. ──► 0... ──► 01.. ──► 0123

    2 log2 N α + 2(N-1)/N nβ + (N-1)/N nγ

Each part is combined by one member and copied by the others. Other numbers of members than powers of two: see
`power_of_two`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.power_of_two import core_links, through_core
from engine.collectives.ops import ReduceOp
from engine.collectives.peers import mesh, message_pieces, wait_all
from engine.transport import Edge, Work


class HalvingDoubling(Collective):
    """Halving and doubling; needs a buffer of half the tensor's size."""

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return the channels that the algorithm sends over, for `Transport.open`."""
        return mesh(members, core_links(len(members)), label)

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        through_core(self.peers, tensor, op, self._halve_and_double)

    def _halve_and_double(self, core: list[int], tensor: Tensor, op: ReduceOp) -> None:
        peers, number = self.peers, core.index(self.position)
        bounds = [0]
        for chunk in tensor.tensor_split(len(core)):
            bounds.append(bounds[-1] + len(chunk))
        exchanges = _exchanges(number, len(core))
        sent: list[Work] = []
        for partner, keep, give in exchanges:
            kept = message_pieces(tensor[bounds[keep[0]] : bounds[keep[1]]])
            arriving = peers.operands(core[partner], kept, "halve")
            sent += [peers.send(core[partner], p) for p in message_pieces(tensor[bounds[give[0]] : bounds[give[1]]])]
            for piece, arrival in zip(kept, arriving, strict=True):
                part = arrival.wait()
                lower, upper = (part, piece) if partner < number else (piece, part)
                op.combine(lower, upper, out=piece)
                arrival.free()
        # What comes back lands where a part of ours was sent from: it was delivered, or there would be no result.
        coming = [
            [peers.recv(core[partner], p) for p in message_pieces(tensor[bounds[give[0]] : bounds[give[1]]])]
            for partner, _, give in exchanges
        ]
        for (partner, keep, _), finished in zip(reversed(exchanges), reversed(coming), strict=True):
            sent += [peers.send(core[partner], p) for p in message_pieces(tensor[bounds[keep[0]] : bounds[keep[1]]])]
            wait_all(finished)
        wait_all(sent)


def _exchanges(number: int, size: int) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """For each halving: the partner, and the ranges of chunks that are kept and given away."""
    found, low, high = [], 0, size
    while high - low > 1:
        half = (high - low) // 2
        middle = low + half
        if number < middle:
            found.append((number + half, (low, middle), (middle, high)))
            high = middle
        else:
            found.append((number - half, (middle, high), (low, middle)))
            low = middle
    return found
