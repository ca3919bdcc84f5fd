"""How many bytes a forward leaves behind for its backward.

Counted by reading the finished graph: every tensor that a node saved, once per storage, parameters left out. Nothing
is hooked, so the measured run computes exactly what any other run computes. Done once per stage and micro-batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from engine.runtime.graph import nodes


def saved_bytes(ends: Sequence[Tensor], without: Sequence[Tensor]) -> int:
    """Bytes of the storages saved in the graph behind `ends`, those of `without` not counted."""
    return storage_bytes((tensor for node in nodes(t.grad_fn for t in ends) for tensor in _saved(node)), without)


def storage_bytes(tensors: Iterable[Tensor], without: Sequence[Tensor] = ()) -> int:
    """Bytes of the storages behind `tensors`, each counted once, those of `without` not at all."""
    seen = {t.untyped_storage().data_ptr() for t in without}
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
