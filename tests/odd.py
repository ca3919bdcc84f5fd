"""Models, data, losses, optimizers and schedulers that cannot work, each in its own way: `odd.NAME` as `_target_`s."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset


class Mute(Exception):
    def __str__(self) -> str:
        raise ArithmeticError("no words")


RAISES: dict[str, Any] = {
    "exit": lambda: sys.exit(3),
    "keyboard": lambda: _raise(KeyboardInterrupt()),
    "mute": lambda: _raise(Mute()),
}


def _raise(error: BaseException) -> None:
    raise error


class Leaves(nn.Module):
    """Raises `what` where it is told to: "init" or "forward"."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__()
        self.linear, self.where, self.what = nn.Linear(8, 5), where, what
        if where == "init":
            RAISES[what]()

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            RAISES[self.what]()
        out: Tensor = self.linear(x)
        return out


def leaving(where: str, what: str) -> list[Any]:
    if where == "target":
        RAISES[what]()
    return [("leaves", lambda: Leaves(where, what)), ("head", lambda: nn.Linear(5, 5))]


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5))


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 5))


def embedding() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(32, 5))


PARTS: dict[str, Any] = {
    "vector": lambda i: torch.full((8,), float(i)),
    "row": lambda i: torch.zeros(1, 8, dtype=torch.uint8),
    "whole": lambda i: torch.ones(8, dtype=torch.int64),
    "growing": lambda i: torch.zeros(8 + i),
    "class": lambda i: i % 5,
    "too large": lambda i: 5,
    "number": lambda i: 0.5,
    "text": lambda i: "hello",
    "nothing": lambda i: None,
    "object": lambda i: object(),
}


class Items(Dataset[Any]):
    """(PARTS[given](i), PARTS[target](i)); `length` may claim more, or what is no length."""

    def __init__(self, given: str = "vector", target: str = "class", length: Any = 32) -> None:
        self.given, self.target, self.length = given, target, length

    def __len__(self) -> Any:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= 32:
            raise IndexError(f"there is no item {index}")
        return PARTS[self.given](index), PARTS[self.target](index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 32


def a_list() -> list[int]:
    return [1, 2, 3]


def a_dict() -> dict[str, int]:
    return {"a": 1}


def detached(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return output.detach().sum(), len(target)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def many(output: Tensor, target: Tensor) -> Any:
    return output.sum(), "many"


def nothing(output: Tensor, target: Tensor) -> None:
    return None


def quits(output: Tensor, target: Tensor) -> None:
    sys.exit(3)


def probabilities(output: Tensor, target: Tensor) -> Tensor:
    """A loss that looks at values: fine, but torch checks that they are probabilities."""
    return -torch.distributions.Categorical(probs=output.softmax(1)).log_prob(target).mean()


def no_optimizer(params: Any) -> int:
    return 5


class NoScheduler:
    def __init__(self, optimizer: Any) -> None: ...


class NeedsMetric(NoScheduler):
    def step(self, loss: float) -> None: ...


class Picky(torch.optim.SGD):
    """An optimizer for matrices, as some are."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        if any(p.ndim != 2 for p in params):
            raise ValueError("matrices only")
        super().__init__(params, lr=0.1)
