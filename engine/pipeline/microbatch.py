"""Which samples a step takes, which replica gets them, and how a replica's share becomes micro-batches.

    epoch order ── step t takes the next G ──> replica r takes its contiguous share ──> passes ──> micro-batches

Pieces differ by at most one in size, larger ones first, and none is empty (the obvious tensor-splitting call gives
3 pieces for 6 rows in 4). All of it follows from (samples, G, R, accumulate, M, seed) alone, so every rank knows every
other rank's sizes without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import a_type
from engine.pipeline.seeds import seed_for


def sizes(total: int, parts: int) -> list[int]:
    """`total` in `parts` pieces that differ by at most one, larger first: sizes(6, 4) == [2, 2, 1, 1]."""
    small, extra = divmod(total, parts)
    return [small + 1] * extra + [small] * (parts - extra)


@dataclass(frozen=True)
class Batches:
    """The batches of a run over `samples`: `global_size` each, the last of an epoch shorter or left out."""

    samples: int
    global_size: int
    replicas: int
    seed: int
    shuffle: bool
    drop_last: bool = False  # leave out a short last batch

    @property
    def per_epoch(self) -> int:
        return self.samples // self.global_size if self.drop_last else -(-self.samples // self.global_size)

    def steps(self, steps: int | None, epochs: int | None) -> int:
        """How many batches a run takes: `steps`, or so many whole epochs where that is None."""
        return steps if steps is not None else (epochs or 0) * self.per_epoch

    def count(self, index: int) -> int:
        """Samples of the `index`-th batch of the run, over all replicas."""
        at = index % self.per_epoch * self.global_size
        return min(self.global_size, self.samples - at)

    def order(self, epoch: int) -> Tensor:
        """The epoch's order of samples: int64 [samples]."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator().manual_seed(seed_for(self.seed, "epoch", epoch))
        return torch.randperm(self.samples, generator=generator)

    def shares(self, replica: int, count: int) -> Iterator[list[int]]:
        """This replica's sample indices for batches 0..count-1, without those that leave it no sample."""
        order, epoch = torch.empty(0), -1
        for index in range(count):
            if index // self.per_epoch != epoch:
                epoch = index // self.per_epoch
                order = self.order(epoch)
            share = sizes(self.count(index), self.replicas)
            at = index % self.per_epoch * self.global_size + sum(share[:replica])
            if share[replica]:
                yield order[at : at + share[replica]].tolist()


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
    """Where each piece starts."""
    return [sum(pieces[:i]) for i in range(len(pieces))]
