"""Binomial tree: reduce to position 0 in ceil(log2 N) levels, then back the same way.

ceil(log2 N) (2α + 2nβ + nγ)          few messages, but the root sends ceil(log2 N) n while leaves send n
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.ops import ReduceOp
from engine.collectives.peers import mesh
from engine.collectives.topologies import Node, binomial, links
from engine.collectives.trees import up_and_down
from engine.transport import Edge


class Tree(Collective):
    """A binomial tree: parts are combined in its order, and every member gets a copy of the root's result."""

    @classmethod
    def nodes(cls, size: int) -> list[Node]:
        """Return each position's place in the tree over `size` members."""
        return binomial(size)

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return the channels that the algorithm sends over, for `Transport.open`."""
        return mesh(members, links(cls.nodes(len(members))), label)

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        for _ in up_and_down(self.peers, self.nodes(self.peers.size)[self.position], tensor, op):
            pass
