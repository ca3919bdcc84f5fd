"""Powers of two out of any number of members, as hypercube algorithms need them (Rabenseifner 2004).

With N = 2^k + r members the first 2r pair up: the odd one of each pair hands its part to the even one and gets the
result back at the end. The 2^k that stay are the core:

    N = 6, r = 2      0 ◄── 1     2 ◄── 3     4     5          core: 0, 2, 4, 5
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.collectives.ops import ReduceOp
from engine.collectives.peers import Peers, message_pieces, wait_all

Hypercube = Callable[[list[int], Tensor, ReduceOp], None]


def core(size: int) -> list[int]:
    """Return the positions that stay, as many as the largest power of two that is not above `size`."""
    extra = size - (1 << (size.bit_length() - 1))
    return [*range(0, 2 * extra, 2), *range(2 * extra, size)]


def core_links(size: int) -> list[tuple[int, int]]:
    """Return the directed pairs that talk: along the cube's dimensions, and those that stay out with their partners."""
    stay = core(size)
    inner = [(stay[i], stay[i ^ bit]) for bit in _bits(len(stay)) for i in range(len(stay))]
    outer = [(k, k + 1) for k in range(size - 1) if k + 1 not in stay]
    return [*inner, *outer, *((b, a) for a, b in outer)]


def _bits(size: int) -> list[int]:
    """1, 2, 4, ... below `size`."""
    return [1 << k for k in range(size.bit_length() - 1)]


def through_core(peers: Peers, tensor: Tensor, op: ReduceOp, reduce: Hypercube) -> None:
    """All-reduce a flat tensor in place: `reduce(core, tensor, op)` does it for the members of the core."""
    stay, me, cut = core(peers.size), peers.position, message_pieces(tensor)
    if me not in stay:
        # The result may arrive where our part still lies: it exists only once that has been delivered.
        arriving = [peers.recv(me - 1, piece) for piece in cut]
        wait_all([*(peers.send(me - 1, piece) for piece in cut), *arriving])
        return
    partner = me + 1 if me + 1 < peers.size and me + 1 not in stay else None
    if partner is not None:
        for piece, arrival in zip(cut, peers.operands(partner, cut, "core"), strict=True):
            op.combine(piece, arrival.wait(), out=piece)
            arrival.free()
    reduce(stay, tensor, op)
    if partner is not None:
        wait_all([peers.send(partner, piece) for piece in cut])
