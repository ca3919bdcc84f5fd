"""Losses that couple the samples of a batch in ways that are easy to miss, and losses that do not."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Rows(Dataset[Any]):
    """32 points; every third target is to be ignored where `ignored`; sorted by class where `ordered`."""

    def __init__(self, ignored: bool = False, ordered: bool = False, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.points = torch.randn(32, 8, generator=draw)
        self.classes = torch.randint(4, (32,), generator=draw)
        if ordered:
            self.classes = self.classes.sort()[0]
        if ignored:
            self.classes[torch.arange(32) % 3 > 0] = -100

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return self.points[index], self.classes[index]


def net(**_: Any) -> list[Any]:
    return [("a", lambda: nn.Linear(8, 8)), ("b", lambda: nn.Linear(8, 4))]


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    """A mean over what is not ignored, which is another denominator in each micro-batch."""
    return F.cross_entropy(output, target)


def balanced(output: Tensor, target: Tensor) -> Tensor:
    """Classes weigh by how seldom they are in the batch."""
    counts = torch.bincount(target, minlength=4).clamp(min=1)
    return F.cross_entropy(output, target, weight=1 / counts.to(output.dtype))


def root(output: Tensor, target: Tensor) -> Tensor:
    """The root of a mean."""
    return F.mse_loss(output, F.one_hot(target, 4).to(output.dtype)).sqrt()


def centred(output: Tensor, target: Tensor) -> Tensor:
    """A small term of the batch's mean."""
    return F.cross_entropy(output, target) + 0.5 * (output.mean() - 0.3) ** 2


def spread(output: Tensor, target: Tensor) -> Tensor:
    """A small term of the variance over the batch."""
    return F.cross_entropy(output, target) + 0.1 * output.sum(-1).var()


def even(output: Tensor, target: Tensor) -> Tensor:
    """The load-balancing term of a mixture of experts."""
    return F.cross_entropy(output, target) + 0.04 * output.softmax(-1).mean(0).pow(2).sum()


class Dropped(nn.Module):
    """A contrastive loss with a dropout, which draws nothing in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        each = F.normalize(self.dropout(output), dim=-1)
        return F.cross_entropy(each @ output.t(), torch.arange(len(each)))


class Moved(nn.Module):
    """A running centre that is moved in training, before it is used."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * output.detach().mean(0))
        return F.cross_entropy(output - self.centre, target, reduction="sum"), len(target)


def python_draws(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * (1 + random.random())


def torch_draws(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(output, 0.5), target)


class Own(nn.CrossEntropyLoss):
    """A class of one's own with torch's arguments."""


class Pair(nn.Linear):
    """Gives logits, and a number of the whole micro-batch."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.pow(2).mean()


def several(**_: Any) -> list[Any]:
    return [("a", lambda: nn.Linear(8, 8)), ("b", lambda: Pair(8, 4))]


def picking(output: Any, target: Tensor) -> tuple[Tensor, int]:
    """Takes the logits alone."""
    return F.cross_entropy(output[0], target, reduction="sum"), len(target)
