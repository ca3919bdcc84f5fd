"""Walking the graph that a forward leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def nodes(roots: Iterable[Any], seen: set[Any] | None = None) -> Iterator[Any]:
    """Every node that a backward from `roots` (nodes, or None) can reach, each once, without those in `seen`.

    What is reached is added to `seen`.
    """
    seen = set() if seen is None else seen
    queue = list(dict.fromkeys(node for node in roots if node is not None and node not in seen))
    seen.update(queue)
    while queue:
        node = queue.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
