"""Small models and data sets for tests, as `_target_`s: `toys.NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

Layers = list[tuple[str, Callable[[], nn.Module]]]


class Block(nn.Module):
    """Linear, Tanh and, where p > 0, dropout."""

    def __init__(self, inputs: int, outputs: int, p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x).tanh(), self.p, self.training)


def mlp4(width: int = 8, classes: int = 5, p: float = 0.0) -> Layers:
    """Four layers, the last one plain."""
    blocks: Layers = [(f"block{i}", lambda: Block(width, width, p)) for i in range(3)]
    return [*blocks, ("head", lambda: nn.Linear(width, classes))]


class Tokens(Dataset[Any]):
    """Vectors with several targets each, some ignored (-100); every `blank`-th sample has none that counts."""

    def __init__(self, samples: int = 64, width: int = 8, classes: int = 5, targets: int = 3, blank: int = 0) -> None:
        g = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, targets, width, generator=g, dtype=torch.float64)
        self.y = torch.randint(classes, (samples, targets), generator=g)
        self.y[torch.rand(samples, targets, generator=g) < 0.3] = -100
        if blank:
            self.y[::blank] = -100

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class TokenLoss:
    """Cross entropy over [N, T, C] and [N, T]: (sum, count of targets not ignored)."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
        return total, self.count(target)

    def count(self, target: Tensor) -> int:
        return int((target != -100).sum())
