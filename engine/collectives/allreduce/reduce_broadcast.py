"""Everybody sends to the first member, which adds in order and sends the result back: what a ring is compared with.

2(N-1)(α + nβ) + (N-1)nγ          the root sends and receives (N-1)n, and everybody waits for it
"""

from __future__ import annotations

from engine.collectives.allreduce.tree import Tree
from engine.collectives.topologies import Node, flat


class ReduceBroadcast(Tree):
    """A tree of one level, added from the left: x_0 + x_1 + x_2 + ..."""

    @classmethod
    def nodes(cls, size: int) -> list[Node]:
        """Return each position's place in the tree over `size` members."""
        return flat(size)
