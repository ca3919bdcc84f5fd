"""Trees over positions 0 .. N-1: who is whose parent. Pure, so that costs and pictures come from here too.

    flat                    binomial                two binary trees, N = 6: inner nodes of one are leaves of the other

      0                       0                           3                      2
    / | \\                   /|\\                         / \\                    / \\
   1  2  3                  1 2 4                        1   5                  0   4
                              | |\\                      / \\  |                  |  / \\
                              3 5 6                    0   2 4                  1 3   5
                                  |
                                  7

Children are listed in the order in which their parts are combined.
"""

from __future__ import annotations

from typing import NamedTuple


class Node(NamedTuple):
    """A position's place in a tree; children in the order in which their parts are combined."""

    parent: int | None
    children: tuple[int, ...]


def links(nodes: list[Node]) -> list[tuple[int, int]]:
    """Return the directed pairs that talk: every child with its parent, up and down."""
    up = [(k, node.parent) for k, node in enumerate(nodes) if node.parent is not None]
    return [*up, *((parent, k) for k, parent in up)]


def flat(size: int, root: int = 0) -> list[Node]:
    """Return a tree of one level: everybody but the root is a leaf."""
    others = tuple(k for k in range(size) if k != root)
    return [Node(None, others) if k == root else Node(root, ()) for k in range(size)]


def binomial(size: int, root: int = 0) -> list[Node]:
    """Return the binomial tree: k's parent is k without its lowest set bit, counted from the root."""
    parents: list[int | None] = [None] * size
    for distance in range(1, size):
        parents[(root + distance) % size] = (root + (distance & (distance - 1))) % size
    return _nodes(parents, root)


def double_binary(size: int) -> tuple[list[Node], list[Node]]:
    """Return two binary trees of which each position is an inner node in one at most.

    Counted from 1, an in-order tree has its leaves at the odd numbers. The second tree is the first one mirrored where
    N is even, and shifted by one where it is odd: either way even numbers change places with odd ones (Sanders, Speck,
    Träff 2009).
    """
    first = [None if p is None else p - 1 for p in (_in_order_parent(k + 1, size) for k in range(size))]
    role = [(k - 1) % size if size % 2 else size - 1 - k for k in range(size)]
    holder = {r: k for k, r in enumerate(role)}
    second = [None if (p := first[r]) is None else holder[p] for r in role]
    return _nodes(first, first.index(None)), _nodes(second, second.index(None))


def _in_order_parent(number: int, size: int) -> int | None:
    """In a binary tree over 1, 2, 3, ... that is numbered from left to right; those above `size` are skipped."""
    root = 1 << (size.bit_length() - 1)
    if number == root:
        return None
    while True:
        low = number & -number
        number = (number ^ low) | (low << 1)
        if number <= size:
            return number


def _nodes(parents: list[int | None], root: int) -> list[Node]:
    """Children in the order of their distance from the root, counted upwards and around."""
    size = len(parents)
    order = sorted(range(size), key=lambda k: (k - root) % size)
    return [Node(parents[k], tuple(c for c in order if parents[c] == k)) for k in range(size)]
