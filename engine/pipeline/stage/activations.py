"""How many bytes a forward leaves behind for its backward.

Counted by reading the finished graph: every tensor that a node saved, once per storage, parameters left out. Nothing
is hooked, so the measured run computes exactly what any other run computes; and no hook is called, so a layer that is
to be run again in its backward (torch.utils.checkpoint) is not run for this. Done once per stage and micro-batch size,
layer by layer: what a layer and one before it both keep is the earlier one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from engine.pipeline.stage.graph import nodes


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


def recomputes(ends: Iterable[Any]) -> bool:
    """Whether the backward behind `ends` may run layers again.

    It may where what was saved is handed out by a hook, as torch.utils.checkpoint does, or where a node is a function
    of someone's own, as its other form is.
    """
    return any(_is_foreign(node) or any(saved.unpack_hook for saved in _raw(node)) for node in nodes(ends))


def _is_foreign(node: Any) -> bool:
    own = getattr(type(node), "_forward_cls", None)
    return own is not None and not own.__module__.startswith("engine.")


def _saved(node: Any) -> Iterator[Tensor]:
    """What a node holds. Hooks that would make a tensor anew are not called: what they hold to do so is counted."""
    for saved in _raw(node):
        held = [saved.data]
        for cell in getattr(saved.unpack_hook, "__closure__", None) or ():  # torch.utils.checkpoint keeps its inputs:
            held += (getattr(each, "data", None) for each in getattr(cell.cell_contents, "saved_args", ()))
            held += getattr(getattr(cell.cell_contents, "input_saver", None), "saved_tensors", ())  # before torch 2.13
        yield from (leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor))


def _raw(node: Any) -> Iterator[Any]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            value = getattr(node, name)
            yield from value if isinstance(value, tuple | list) else (value,)
