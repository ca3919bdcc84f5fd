"""Stages that sleep a configured time instead of computing, to measure schedules and the engine alone.

A layer is a tiny linear map that sleeps in its forward and in its backward. The map makes it a model like any other:
it has weights to reduce and to update, and its loss falls. Where the backward is done in halves, so is its sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary

Layers = list[tuple[str, Callable[[], nn.Module]]]
Cost = float | Sequence[float]


class _Late(torch.autograd.Function):
    """The identity, whose forward and backward sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, input_s: float, weight_s: float, later: Any) -> Tensor:
        ctx.input_s, ctx.weight_s, ctx.later = input_s, weight_s, later
        _pause(x, forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.later is None:
            _pause(grad, ctx.input_s + ctx.weight_s)
        else:
            _pause(grad, ctx.input_s)
            ctx.later(partial(time.sleep, ctx.weight_s))
        return grad, None, None, None, None


def late(x: Tensor, forward_s: float, input_s: float, weight_s: float, later: Any = None) -> Tensor:
    """Return `x` after a sleep; its gradients sleep too.

    Open to torch's overrides, so that whoever wants the weight gradients later can call it with `later`: it is given
    what can wait, a function of no arguments, during the backward.
    """
    if has_torch_function_unary(x):
        slow: Tensor = handle_torch_function(late, (x,), x, forward_s, input_s, weight_s)
        return slow
    return _Late.apply(x, forward_s, input_s, weight_s, later)


late.takes_later = True  # type: ignore[attr-defined]


def _pause(value: Tensor, seconds: float) -> None:
    """Sleep, unless `value` only stands for a tensor: a pass that finds out shapes costs nothing."""
    if seconds > 0 and not isinstance(value, FakeTensor):
        time.sleep(seconds)


class Sleeper(nn.Module):
    """[N, ...] -> [N, width]: the first `width` values of a sample (zeros where it has fewer) through a linear map.

    Costs in milliseconds. Both parts of the backward are slept, also where no input gradient is wanted.
    """

    def __init__(self, width: int, forward_ms: float, input_backward_ms: float, weight_backward_ms: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s, self.input_s, self.weight_s = (
            ms / 1e3 for ms in (forward_ms, input_backward_ms, weight_backward_ms)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, ...] -> [N, width], after the configured sleep."""
        flat = x.flatten(1).to(self.linear.weight.dtype)
        fitted = F.pad(flat, (0, self.linear.in_features - flat.shape[1]))
        return late(self.linear(fitted), self.forward_s, self.input_s, self.weight_s)


def sleep(
    stages: int = 1,
    chunks: int = 1,
    forward_ms: Cost = 5.0,
    input_backward_ms: Cost = 5.0,
    weight_backward_ms: Cost = 5.0,
    width: int = 16,
) -> Layers:
    """Return one sleeping layer per stage, or one per entry of a list of costs: [N, ...] -> [N, width].

    `stages` counts those of the whole pipeline, `chunks` those of one rank. A number is the cost of a rank's slice of
    the model, shared by its layers (1 / chunks each where there is one per stage); an entry of a list is the cost of
    that layer. Raises ValueError for negative costs and for lists of different lengths.
    """
    costs = {
        "forward_ms": forward_ms,
        "input_backward_ms": input_backward_ms,
        "weight_backward_ms": weight_backward_ms,
    }
    lengths = {name: len(cost) for name, cost in costs.items() if isinstance(cost, Sequence)}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        given = ", ".join(f"model.{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"lists of costs need one entry per stage, all the same number: {given}")
    layers = next(iter(lengths.values()), stages)
    slices = stages / chunks
    tables = [_table(f"model.{name}", cost, layers, slices) for name, cost in costs.items()]
    return [(f"stage{i}", partial(Sleeper, width, *parts)) for i, parts in enumerate(zip(*tables, strict=True))]


def _table(name: str, cost: Cost, layers: int, slices: float) -> list[float]:
    """Return the cost of each layer in milliseconds."""
    entries = list(cost) if isinstance(cost, Sequence) else [cost * slices / layers] * layers
    if any(isinstance(entry, str) or entry < 0 for entry in entries):
        raise ValueError(f"{name}={cost} must be a number of milliseconds, or a list of them, none negative")
    return entries
