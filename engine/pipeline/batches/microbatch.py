"""How a replica's share of a batch becomes passes of micro-batches.

    a replica's share ──> passes ──> micro-batches

Pieces differ by at most one in size, larger ones first, and none is empty (the obvious tensor-splitting call gives
3 pieces for 6 rows in 4). All of it follows from (share, accumulate, M) alone, so every rank knows every other rank's
sizes without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from engine.errors import a_type


def sizes(total: int, parts: int) -> list[int]:
    """`total` in `parts` pieces that differ by at most one, larger first: sizes(6, 4) == [2, 2, 1, 1]."""
    small, extra = divmod(total, parts)
    return [small + 1] * extra + [small] * (parts - extra)


def passes(share: int, accumulate: int, microbatches: int, legal: Callable[[int], int]) -> list[list[int]]:
    """Micro-batch sizes of each pass of a step, for a replica whose share is `share` samples.

    A share smaller than what was configured lowers the number of passes, then of micro-batches; `legal(m)` gives the
    largest number of micro-batches at most m for which the schedule is defined. Empty for a share of 0.
    """
    if share == 0:
        return []
    pieces = sizes(share, min(accumulate, share))
    return [sizes(piece, legal(min(microbatches, piece))) for piece in pieces]


def take(value: Any, start: int, rows: int, total: int, where: str = "") -> Any:
    """Rows start..start+rows of a batch of `total`, as tensors of their own.

    Tensors are cut on dim 0, lists of length `total` likewise; numbers, strings and None are passed on as they are.
    They are copies: slices would share a version counter, and an in-place first layer would spoil its neighbours.
    ValueError for anything else, with its type and its position: `where` the value stands in the batch, as `[1]['x']`.
    """

    def part(key: Any, item: Any) -> Any:
        return take(item, start, rows, total, f"{where}[{key!r}]")

    if isinstance(value, Tensor):
        if value.dim() == 0:
            return value
        if value.shape[0] != total:
            shape = tuple(value.shape)
            raise ValueError(f"a batch of {total} samples holds a tensor of shape {shape}{_at(where)}: dim 0 differs")
        return value[start : start + rows].clone()
    if isinstance(value, dict):
        return {key: part(key, item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [part(index, item) for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        if any(isinstance(item, Tensor | dict | list | tuple) for item in value):
            return [part(index, item) for index, item in enumerate(value)]
        return value[start : start + rows] if len(value) == total else value
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    raise ValueError(
        f"a batch holds {a_type(value)}{_at(where)}, which cannot be split into micro-batches; "
        "allowed are tensors, lists, tuples, dictionaries, numbers, strings and None"
    )


def _at(where: str) -> str:
    return f" at batch{where}" if where else ""


def offsets(pieces: Sequence[int]) -> list[int]:
    """The first row of each piece."""
    return [sum(pieces[:i]) for i in range(len(pieces))]


def samples_of(value: Any) -> int:
    """How many samples a batch holds: the length of its first tensor that has dimensions. ValueError without one."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ValueError(f"the input of a batch is {a_type(value)} without a tensor whose dimension 0 counts its samples")
