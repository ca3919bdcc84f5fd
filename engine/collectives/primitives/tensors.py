"""What a message is made from: the elements of any tensor, one behind the other, and their way back.

A tensor that was made in `torch.inference_mode()` may be written in that mode only, and so may whatever is kept from
call to call and was made there. So collectives run outside of it (`own_mode`), and take and give back copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

own_mode = torch.inference_mode(mode=False)  # decorates what callers may call in inference mode


def dense(tensor: Tensor) -> Tensor:
    """Return the elements as a flat contiguous tensor without a graph: a view where there is one, else a copy."""
    if tensor.is_inference():
        tensor = tensor.clone()
    solid = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return solid.as_strided((solid.numel(),), (1,))  # strides of dimensions of size 0 and 1 may be anything


def apart(flat: Tensor, written: Iterable[Tensor]) -> Tensor:
    """Return `flat`, which is to be sent, or a copy where a tensor that is written meanwhile shares its memory."""
    begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
    shared = any(each.data_ptr() < end and begin < each.data_ptr() + each.nbytes for each in written)
    return flat.clone() if shared else flat


def give_back(tensor: Tensor, flat: Tensor) -> None:
    """Put the elements of `dense(tensor)` back where that was a copy."""
    if tensor.data_ptr() != flat.data_ptr():
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.copy_(flat.view(tensor.shape))


def described(tensor: Tensor) -> str:
    """Describe a tensor in messages: `[2, 3] float32`."""
    return f"{list(tensor.shape)} {name(tensor.dtype)}"


def described_all(tensors: Sequence[Tensor]) -> str:
    """Describe tensors in messages: `[2, 3], [4] float32`; every dtype that occurs is named."""
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    return f"{shapes} {'/'.join(dict.fromkeys(name(tensor.dtype) for tensor in tensors))}"


def name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
