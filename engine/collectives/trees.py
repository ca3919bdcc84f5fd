"""Along a tree: parts are combined on the way to the root, the result is copied on the way back.

    up     wait for a piece of each child, combine, pass on          piece by piece: while an inner node combines
    down   wait for a piece of the parent, pass on                   one, the next is on its way to it

The root sends a piece down as soon as it has it, while later ones are still on their way up. Receives are posted a
piece ahead; the way down is received straight into the tensor, because a final piece exists only once our own part of
it was delivered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from engine.collectives.ops import ReduceOp
from engine.collectives.peers import Peers, message_pieces, wait_all
from engine.collectives.topologies import Node
from engine.transport import Work


def up_and_down(peers: Peers, node: Node, tensor: Tensor, op: ReduceOp, name: str = "tree") -> Iterator[None]:
    """All-reduce a flat tensor in place; yields before each wait. `name` tells the buffers of several trees apart."""
    cut = message_pieces(tensor)
    arriving = [] if node.parent is None else [peers.recv(node.parent, piece) for piece in cut]
    sent: list[Work] = []
    for piece in _combined(peers, node.children, cut, op, name):
        if node.parent is None:
            sent += [peers.send(child, piece) for child in reversed(node.children)]
        else:
            sent.append(peers.send(node.parent, piece))
        yield
    for piece, work in zip(cut, arriving, strict=False):
        work.wait()
        sent += [peers.send(child, piece) for child in reversed(node.children)]
        yield
    wait_all(sent)


def up(peers: Peers, node: Node, tensor: Tensor, op: ReduceOp) -> None:
    """Reduce to the root; the tensor of an inner node holds the combination of its subtree afterwards."""
    sent: list[Work] = []
    for piece in _combined(peers, node.children, message_pieces(tensor), op, "up"):
        if node.parent is not None:
            sent.append(peers.send(node.parent, piece))
    wait_all(sent)


def down(peers: Peers, node: Node, tensor: Tensor) -> None:
    """Copy the root's flat tensor into everybody's."""
    cut = message_pieces(tensor)
    arriving = [] if node.parent is None else [peers.recv(node.parent, piece) for piece in cut]
    sent: list[Work] = []
    for number, piece in enumerate(cut):
        if arriving:
            arriving[number].wait()
        sent += [peers.send(child, piece) for child in reversed(node.children)]  # the deepest subtree first
    wait_all(sent)


def _combined(
    peers: Peers, children: Sequence[int], cut: Sequence[Tensor], op: ReduceOp, name: str
) -> Iterator[Tensor]:
    """Each piece in turn, once the children's have been combined into it, in their order."""

    def post(number: int) -> list[tuple[Tensor, Work]]:
        if number == len(cut):
            return []
        like = cut[number]
        buffers = [peers.scratch((name, child, number % 2), like, len(like)) for child in children]
        return [(buffer, peers.recv(child, buffer)) for child, buffer in zip(children, buffers, strict=True)]

    following = post(0)
    for number, piece in enumerate(cut):
        arriving, following = following, post(number + 1)
        for buffer, work in arriving:
            work.wait()
            op.combine(piece, buffer, out=piece)
        yield piece
