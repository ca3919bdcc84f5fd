"""Layers and losses that do more than map an input to an output, as `_target_`s: `peculiar.NAME`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from toys import Block, Layers, Tokens

# ---- containers --------------------------------------------------------------------------------------------------


class Doubled(nn.Sequential):
    """A container with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Named(nn.Sequential):
    """A container that only says what is in it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


class Reversed(nn.Sequential):
    """A container that runs its children in another order."""

    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


class Called(nn.Sequential):
    """A container that does something around its forward."""

    def __call__(self, x: Tensor) -> Any:
        return 2 * super().__call__(x)


class Scaled(nn.Sequential):
    """A container with a parameter of its own, which a hook of the first child uses."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(2.0))


CONTAINERS = {"own": Doubled, "iter": Reversed, "call": Called, "tensors": Scaled}
HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda module, given, result: 2 * result),
    "pre": lambda m: m.register_forward_pre_hook(lambda module, given: (2 * given[0],)),
    "backward": lambda m: m.register_full_backward_hook(lambda module, given, result: None),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, given: None),
    "global": lambda m: nn.modules.module.register_module_forward_hook(lambda module, given, result: None),
}


def container(how: str = "plain") -> nn.Module:
    """A container; `how`: plain, named, or what it does besides running its children."""
    if how == "named":
        return Named()
    made = CONTAINERS.get(how, nn.Sequential)(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    if how == "instance":
        made.forward = lambda x: 2 * made[2](made[1](made[0](x)))
    if how in HOOKS:
        HOOKS[how](made)
    return made


class Around(nn.Module):
    """A layer that holds such a container: nothing takes it apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubled(nn.Linear(8, 8), Doubled(nn.Linear(8, 8), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def nested() -> Layers:
    return [("a", Around), ("b", lambda: Doubled(nn.Linear(8, 8), nn.Tanh())), ("head", lambda: nn.Linear(8, 5))]


# ---- complex numbers ---------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """x + Linear(x rotated by a table of complex numbers); a mask and a count beside it, and complex weights."""

    def __init__(self, width: int, trained: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        table = torch.polar(torch.ones(width // 2), torch.arange(width // 2) + 1.0)
        self.table = nn.Parameter(table) if trained else nn.Buffer(table)
        self.mask = nn.Buffer(torch.tensor([True, False]))
        self.seen = nn.Buffer(torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        rotated = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)) if x.dtype == torch.bfloat16 else _pairs(x))
        turned = torch.view_as_real(rotated * self.table).flatten(-2)
        y: Tensor = x + self.linear(turned * self.mask[0] * (self.seen / 3))
        return y


def _pairs(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).contiguous()


def rotary(trained: bool = False, width: int = 8, classes: int = 5) -> Layers:
    return [
        ("a", lambda: Rotary(width, trained)),
        ("b", lambda: Rotary(width, trained)),
        ("head", lambda: nn.Linear(width, classes)),
    ]


class Waves(Tokens):
    """Complex inputs, in single precision."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return torch.complex(x, x.flip(0)).to(torch.complex64), y


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.real + x.imag


def spectral(width: int = 8, classes: int = 5) -> Layers:
    """Complex linear layers on complex inputs: complex tensors and gradients cross the boundaries."""
    return [
        ("a", lambda: nn.Linear(width, width, dtype=torch.complex64)),
        ("b", lambda: nn.Linear(width, width, dtype=torch.complex64)),
        ("c", lambda: nn.Linear(width, width, dtype=torch.complex64)),
        ("real", Real),
        ("head", lambda: nn.Linear(width, classes)),
    ]


# ---- modes -------------------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """Linear, BatchNorm in evaluation mode from the start, dropout, and BatchNorm that is trained."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.linear, self.frozen, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.how = how
        with torch.no_grad():
            self.frozen.running_mean.fill_(0.5)  # type: ignore[union-attr]
            self.frozen.running_var.fill_(2.0)  # type: ignore[union-attr]
        if how == "flag":
            self.frozen.eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        if self.how == "override":
            self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.frozen(self.linear(x).flatten(0, 1)).tanh()).view(x.shape)


def frozen(how: str = "flag", width: int = 8, classes: int = 5) -> Layers:
    """`how`: flag (left in evaluation by its maker), override (by its own `train()`), whole (the second layer is)."""
    return [
        ("a", lambda: Frozen(width, how)),
        ("b", lambda: Frozen(width, how).eval() if how == "whole" else Block(width, width, 0.0)),
        ("head", lambda: nn.Linear(width, classes)),
    ]
