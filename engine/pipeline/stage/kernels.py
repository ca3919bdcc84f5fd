"""Linear and convolution taken apart: forward, gradient of the input, gradients of weight and bias.

Each part calls what torch's autograd calls for it, with operands in the layout in which autograd gives them: the parts
of a backward are bit for bit those of the whole. x, weight and bias are the forward's, grad is that of its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Wanted = Sequence[bool]  # weight, bias
Parts = tuple[Tensor | None, Tensor | None]


class Kernel(Protocol):
    """An operation of an input and parameters whose weight gradients can be computed later."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output for the input `x`."""

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of `x`, given that of the output."""

    def weight_gradients(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Wanted) -> Parts:
        """The gradients of weight and bias that are `wanted`; of `weight` the layout is read, not the values."""


class Linear:
    """[N, I] x [O, I] -> [N, O]. A product whose factor lies column after column is taken transposed, as torch does."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output, x @ weight.T + bias: [N, O]."""
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The product grad @ weight: [N, I]."""
        return torch.mm(weight.t(), grad.t()).t() if _by_columns(x) else torch.mm(grad, weight)

    def weight_gradients(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Wanted) -> Parts:
        """The product grad.T @ x, [O, I], and the sum of grad over samples, [O]."""
        to_weight = to_bias = None
        if wanted[0]:
            straight = _by_columns(weight.t())
            to_weight = torch.mm(grad.t(), x) if straight else torch.mm(x.t(), grad).t()
        if wanted[1]:
            to_bias = grad.sum_to_size(weight.shape[0])
        return to_weight, to_bias


def _by_columns(matrix: Tensor) -> bool:
    return matrix.stride() == (1, matrix.shape[0])


class Convolution(NamedTuple):
    """[N, C, ...] over 1, 2 or 3 dimensions; the fields have an entry per dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of `x`: [N, O, ...]."""
        return torch.convolution(x, weight, bias, *self._options)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The transposed convolution of `grad`, of the shape of `x`."""
        return self._backward(grad, x, weight, (True, False, False))[0]

    def weight_gradients(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Wanted) -> Parts:
        """The gradients of weight and bias that are `wanted`, in their shapes."""
        like = weight if weight.dtype == x.dtype else torch.empty_like(weight, dtype=x.dtype)
        _, to_weight, to_bias = self._backward(grad, x, like, (False, *wanted))
        return to_weight, to_bias

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
        backward = torch.ops.aten.convolution_backward
        found: tuple[Tensor, ...] = backward(grad, x, weight, [weight.shape[0]], *self._options, wanted)
        return found

    @property
    def _options(self) -> tuple[Any, ...]:
        """As torch's operators take them: with `transposed` and an output padding, which only that has."""
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups
