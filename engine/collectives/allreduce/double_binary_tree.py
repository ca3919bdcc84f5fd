"""Two binary trees, half of the tensor each; who is an inner node in one is a leaf in the other (Sanders, Speck, Träff
2009, Parallel Computing 35(12)).

Logarithmic latency as in one tree, but no rank sends more than 2n: an inner node sends n/2 up and n/2 to each of two
children, and as a leaf of the other tree n/2 up.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.ring_pass import run
from engine.collectives.ops import ReduceOp
from engine.collectives.peers import mesh
from engine.collectives.topologies import double_binary, links
from engine.collectives.trees import up_and_down
from engine.transport import Edge, Transport


class DoubleBinaryTree(Collective):
    """Each tree has channels of its own, so that neither waits for the other's messages."""

    def __init__(self, transport: Transport, members: Sequence[int], label: str) -> None:
        super().__init__(transport, members, label)
        self._trees = [self.peers.labelled(_label(label, number)) for number in (0, 1)]

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return the channels that the algorithm sends over, for `Transport.open`."""
        trees = enumerate(double_binary(len(members)))
        return [edge for number, nodes in trees for edge in mesh(members, links(nodes), _label(label, number))]

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        shapes, halves = double_binary(self.peers.size), tensor.tensor_split(2)
        parts = zip(self._trees, shapes, halves, strict=True)
        run(*(up_and_down(peers, nodes[self.position], half, op) for peers, nodes, half in parts))


def _label(label: str, number: int) -> str:
    return f"{label}/tree{number}"
