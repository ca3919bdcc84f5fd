"""Small models and data sets for tests, as `_target_`s: `toys.NAME`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
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


class Augmented(Tokens):
    """Inputs and targets are what every default generator draws, whatever the sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
        value = torch.tensor(drawn, dtype=torch.float64)
        return value, value.clone()


class Same(Tokens):
    """One sample, however often it is asked for."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(0)


class Words(Tokens):
    """Whole numbers below 7, several to a sample, and targets as ever."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index].abs().long()[:, 0] % 7, self.y[index]


class Functional(nn.Module):
    """An embedding that torch does not see as one."""

    def __init__(self, mode: str, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, width), requires_grad=mode != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.weight, sparse=True)


def embedded(mode: str = "dense", width: int = 8, classes: int = 5) -> Layers:
    """An embedding and a linear layer; `mode`: dense, sparse, functional (sparse too), frozen (and so not sparse)."""
    functional = mode in ("functional", "frozen")
    first = (lambda: Functional(mode, width)) if functional else lambda: nn.Embedding(7, width, sparse=mode == "sparse")
    return [("words", first), ("head", lambda: nn.Linear(width, classes))]


class TokenLoss:
    """Cross entropy over [N, T, C] and [N, T]: (sum, count of targets not ignored)."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
        return total, self.count(target)

    def count(self, target: Tensor) -> int:
        return int((target != -100).sum())


class Centre(nn.Module):
    """The token loss of what is left above a running centre, which training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Buffer(torch.zeros(5, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        found = TokenLoss()(output - self.centre, target)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * output.detach().mean((0, 1))
        return found


class Pair(nn.Module):
    """Two linear layers of one shape, registered in the order that `order` spells: ab, or ba."""

    def __init__(self, width: int, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule("b")(self.get_submodule("a")(x).tanh())
        return y


def paired(order: str = "ab", width: int = 8, classes: int = 5) -> Layers:
    """Layers whose parameters are the same whatever the order of their registration."""
    return [("first", lambda: Pair(width, order)), ("second", lambda: Pair(width, order)),
            ("head", lambda: nn.Linear(width, classes))]  # fmt: skip


class Ends(nn.Module):
    """A linear layer whose output is handed on in the layout that `how` names."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.how = how
        self.nothing = nn.Parameter(torch.zeros(0)) if how == "hollow" else None

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        half = y.shape[-1] // 2
        if self.how == "transposed":
            return y[..., :half].transpose(0, 1).contiguous().transpose(0, 1)
        if self.how == "sliced":
            return y[..., ::2]
        if self.how == "expanded":
            return y[..., :1].expand(*y.shape[:-1], half)
        if self.how == "dict":
            ids = torch.arange(x.shape[0])
            return {"ids": ids, "h": (y[..., :half], y[..., half:]), "mask": None, "n": 3, "keep": ids % 2 == 0}
        if self.nothing is not None:
            return {"ids": torch.arange(0), "h": y[..., :half] + self.nothing.sum(), "none": y[..., :0]}
        raise AssertionError(self.how)


class Begins(nn.Module):
    """Takes what `Ends` hands on; its first operation works in place, where one process could do that too."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.how = how

    def forward(self, x: Any) -> Tensor:
        if self.how == "hollow":
            assert x["none"].shape[-1] == x["ids"].shape[0] == 0
            x = x["h"] + x["none"].sum()
        elif isinstance(x, dict):
            a, b = x["h"]
            x = torch.where(x["keep"][:, None, None], a, b * x["n"]) + x["ids"][:, None, None]
        elif self.how == "expanded":
            x = x * 0.5
        else:
            x.mul_(0.5).add_(1.0)
        return self.linear(x)


def odd_boundary(how: str, width: int = 8, classes: int = 5) -> Layers:
    """Two layers with an unusual boundary between them, then a plain one."""
    return [
        ("ends", lambda: Ends(width, how)),
        ("begins", lambda: Begins(width, how)),
        ("head", lambda: nn.Linear(width, classes)),
    ]


class Sometimes(nn.Module):
    """A branch that only runs in micro-batches whose first sample has a positive first feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always, self.branch = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.branch(x) if not _fake(x) and float(x[0].flatten()[0]) > 0 else y


def _fake(x: Tensor) -> bool:
    return type(x).__name__ == "FakeTensor"


def sometimes(width: int = 8, classes: int = 5) -> Layers:
    return [("first", lambda: Sometimes(width)), ("tanh", nn.Tanh), ("head", lambda: nn.Linear(width, classes))]


class Swallow(torch.autograd.Function):
    """The identity, whose backward gives nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Closed(nn.Module):
    """Lets no gradient through, in micro-batches whose first sample has a positive first feature or, `always`, in any.
    What comes before still has its graph."""

    def __init__(self, width: int, always: bool) -> None:
        super().__init__()
        self.linear, self.always = nn.Linear(width, width), always

    def forward(self, x: Tensor) -> Tensor:
        closed = self.always or (not _fake(x) and float(x.detach().flatten()[0]) > 0)
        return self.linear(x.detach()) + (Swallow.apply(x) if closed else x)


def closed(always: bool = True, width: int = 8, classes: int = 5) -> Layers:
    return [
        ("before", lambda: Block(width, width, 0.0)),
        ("closed", lambda: Closed(width, always)),
        ("tanh", nn.Tanh),
        ("head", lambda: nn.Linear(width, classes)),
    ]


class Normed(nn.Module):
    """Linear and BatchNorm over the flattened positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).flatten(0, 1)).view(x.shape)


def normed(width: int = 8, classes: int = 5) -> Layers:
    return [("a", lambda: Normed(width)), ("b", lambda: Normed(width)), ("head", lambda: nn.Linear(width, classes))]


class Fails(nn.Module):
    """Raises in the `at`-th real forward."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.seen = at, 0
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if not _fake(x):
            if self.seen == self.at:
                raise ArithmeticError("the toy fails as asked")
            self.seen += 1
        return x * self.weight


def failing(at: int = 2, width: int = 8, classes: int = 5) -> Layers:
    return [
        ("block", lambda: Block(width, width, 0.0)),
        ("fails", lambda: Fails(at)),
        ("head", lambda: nn.Linear(width, classes)),
    ]


class Broken(Tokens):
    """A data set whose item `at` cannot be read, once the run has begun."""

    def __init__(self, at: int = 20) -> None:
        super().__init__()
        self.at = at

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.at:
            raise OSError(f"item {index} cannot be read")
        return super().__getitem__(index)


def mlp(layers: int = 16, width: int = 8, classes: int = 5) -> Layers:
    """As many layers as are wanted, so that every rank of a test can have several stages."""
    blocks: Layers = [(f"block{i}", lambda: Block(width, width, 0.0)) for i in range(layers - 1)]
    return [*blocks, ("head", lambda: nn.Linear(width, classes))]


def sequential(width: int = 8, classes: int = 5) -> nn.Sequential:
    """Built as a whole; one activation is used twice."""
    tanh = nn.Tanh()
    return nn.Sequential(nn.Linear(width, width), tanh, nn.Linear(width, width), tanh, nn.Linear(width, classes))


class Again(nn.Module):
    """A block that keeps nothing but its input: it is computed again in its backward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return y

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.state_dict(*args, **kwargs)


def checkpointed(width: int = 8, classes: int = 5, reentrant: bool = False, p: float = 0.0) -> Layers:
    """`mlp4`, its blocks recomputed; a reentrant checkpoint wants an input with a gradient, which the first lacks."""
    first, *blocks, head = mlp4(width, classes, p)
    return [first, *((name, lambda make=make: Again(make(), reentrant)) for name, make in blocks), head]


class Recurrent(nn.Module):
    """A GRU, which keeps a list of its weights besides its attributes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gru(x)[0]
        return y


def recurrent(width: int = 8, classes: int = 5) -> Layers:
    return [
        ("a", lambda: Recurrent(width)),
        ("b", lambda: Recurrent(width)),
        ("head", lambda: nn.Linear(width, classes)),
    ]


class TiedInside(nn.Module):
    """One weight under two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).tanh())
        return y


def tied_inside(width: int = 8, classes: int = 5) -> Layers:
    return [
        ("a", lambda: TiedInside(width)),
        ("b", lambda: TiedInside(width)),
        ("head", lambda: nn.Linear(width, classes)),
    ]


def _frozen(width: int) -> nn.Module:
    block = Block(width, width, 0.0)
    block.linear.weight.requires_grad_(False)
    return block


def partly_frozen(width: int = 8, classes: int = 5) -> Layers:
    """Of the first two layers only the biases are trained."""
    return [("a", lambda: _frozen(width)), ("b", lambda: _frozen(width)), ("head", lambda: nn.Linear(width, classes))]


class Hiding(nn.Module):
    """Reads its weight from a list of its own, not from the attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.kept = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0].t() + self.linear.bias
