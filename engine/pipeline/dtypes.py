"""What precision a tensor has in a run: floating and complex numbers follow the run's, anything else stays as it is.

`module.to(dtype)` is not used: it makes complex tensors real (tables of rotary embeddings, Fourier layers).
"""

from __future__ import annotations

import torch
from torch import nn


def in_precision(own: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """The dtype of a tensor of dtype `own` in a run whose parameters are `wanted`; complex ones have two of these."""
    if own.is_complex:
        return wanted.to_complex()
    return wanted if own.is_floating_point else own


def cast(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move the parameters and buffers of a module, in place: to `device`, in the run's precision."""
    return module._apply(lambda tensor: tensor.to(device, in_precision(tensor.dtype, dtype)))
