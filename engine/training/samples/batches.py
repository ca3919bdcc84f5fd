"""Which samples a step takes, and which replica gets them.

    epoch order ── step t takes the next G ──> replica r takes its contiguous share

All of it follows from (samples, G, R, seed) alone, so every rank knows every other rank's sizes without asking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.pipeline.batches.microbatch import sizes
from engine.pipeline.seeds import seed_for


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
        """Batches of an epoch."""
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

    def shares(self, replica: int, count: int, start: int = 0) -> Iterator[list[int]]:
        """This replica's sample indices for batches start..count-1, without those that leave it no sample."""
        order, epoch = torch.empty(0), -1
        for index in range(start, count):
            if index // self.per_epoch != epoch:
                epoch = index // self.per_epoch
                order = self.order(epoch)
            share = sizes(self.count(index), self.replicas)
            at = index % self.per_epoch * self.global_size + sum(share[:replica])
            if share[replica]:
                yield order[at : at + share[replica]].tolist()

    def shares_before(self, replica: int, start: int) -> int:
        """How many of the batches before `start` leave this replica a sample."""
        epochs, rest = divmod(start, self.per_epoch)
        some = [sizes(self.count(index), self.replicas)[replica] > 0 for index in range(self.per_epoch)]
        return epochs * sum(some) + sum(some[:rest])
