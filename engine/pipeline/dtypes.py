"""What precision a tensor has in a run: floating and complex numbers follow the run's, anything else stays as it is.

`module.to(dtype)` is not used: it makes complex tensors real (tables of rotary embeddings, Fourier layers).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def in_precision(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor of dtype `own` in a run whose parameters are `wanted` (None: whatever they are made as).

    Complex tensors get the complex dtype whose parts are `wanted`.
    """
    if wanted is None:
        return own
    if own.is_complex:
        return wanted.to_complex()
    return wanted if own.is_floating_point else own


def cast(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Move the parameters and buffers of a module, in place: to `device`, in the run's precision."""
    return module._apply(lambda tensor: tensor.to(device, in_precision(tensor.dtype, dtype)))


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Tensors of a nesting on `device`, floating ones as `dtype`, complex ones likewise; the rest as it is."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, in_precision(leaf.dtype, dtype), non_blocking=True)

    return pytree.tree_map(move, value)
