"""What a message is made from: the elements of any tensor, one behind the other, and their way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense(tensor: Tensor) -> Tensor:
    """The elements as a flat contiguous tensor without a graph: a view where there is one, else a copy."""
    solid = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return solid.as_strided((solid.numel(),), (1,))  # strides of dimensions of size 0 and 1 may be anything


def give_back(tensor: Tensor, flat: Tensor) -> None:
    """Put the elements of `dense(tensor)` back where that was a copy."""
    if tensor.data_ptr() != flat.data_ptr():
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.shape))


def described(tensor: Tensor) -> str:
    """`[2, 3] float32`."""
    return f"{list(tensor.shape)} {name(tensor.dtype)}"


def described_all(tensors: Sequence[Tensor]) -> str:
    """`[2, 3], [4] float32`; every dtype that occurs is named."""
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    return f"{shapes} {'/'.join(dict.fromkeys(name(tensor.dtype) for tensor in tensors))}"


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
