"""How many bytes a forward leaves behind for its backward.

Counted by reading the finished graph: every tensor that a node saved, once per storage, parameters left out. Nothing
is hooked, so the measured run computes exactly what any other run computes. Done once per stage and micro-batch size,
layer by layer: what a layer and one before it both keep is the earlier one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from engine.runtime.graph import nodes


def saved_bytes(parts: Sequence[Sequence[Any]], without: Sequence[Tensor]) -> list[int]:
    """For each part, given by the nodes that end it, the bytes of the storages saved in the graph behind these.

    What an earlier part counts is not counted again, and neither are the storages of `without`.
    """
    reached: set[Any] = set()
    counted = _storages(without)
    return [_bytes((tensor for node in nodes(ends, reached) for tensor in _saved(node)), counted) for ends in parts]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    return _bytes(tensors, set())


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that are not in `seen`, to which they are added."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _saved(node: Any) -> Iterator[Tensor]:
    names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:  # what was saved has been changed in place: the backward will say so where it matters
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Tensor):
                yield item
