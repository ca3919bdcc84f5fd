"""Plain data as JSON that comes back as it was: whole numbers as keys, tuples, small tensors.

    [..], {"word": ..}, numbers, words       as they are
    any other dict                            {"$dict": [[key, value], ...]}, or "$counter"
    tuple                                     {"$tuple": [...]}
    tensor of at most 1,024 elements          {"$tensor": [dtype, shape, bytes in hexadecimal]}

What an optimizer's groups and a scheduler keep is such data. Nothing else is stored, and nothing is called when it is
read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOST_ELEMENTS = 1024
_SCALARS = (bool, int, float, str, type(None))


def encode(value: Any, at: str) -> Any:
    """Return `value` as JSON; ValueError naming its place `at` for what is no plain data."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Tensor):
        return {"$tensor": _tensor(value, at)}
    if type(value) is list:
        return [encode(item, f"{at}[{n}]") for n, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, f"{at}[{n}]") for n, item in enumerate(value)]}
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        items = [[encode(key, at), encode(item, f"{at}.{key}")] for key, item in value.items()]
        if type(value) is Counter:
            return {"$counter": items}
        words = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if words else {"$dict": items}
    raise ValueError(f"{at} is a {type(value).__name__}, which a checkpoint cannot hold: it stores plain data only")


def decode(value: Any) -> Any:
    """Return what `encode` was given. ValueError for what it cannot have made."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        match key:
            case "$tuple":
                return tuple(decode(item) for item in inner)
            case "$dict":
                return {decode(k): decode(v) for k, v in inner}
            case "$counter":
                return Counter({decode(k): decode(v) for k, v in inner})
            case "$tensor":
                return _from_bytes(*inner)
    return {key: decode(item) for key, item in value.items()}


def _tensor(value: Tensor, at: str) -> list[Any]:
    if value.numel() > MOST_ELEMENTS or value.layout is not torch.strided:
        raise ValueError(f"{at} is a tensor of {value.numel():,} elements, which belongs to no parameter")
    flat = value.detach().cpu().contiguous().flatten()
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return [str(value.dtype).removeprefix("torch."), list(value.shape), raw.hex()]


def _from_bytes(name: str, shape: list[int], raw: str) -> Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r:.40}")
    content = bytearray.fromhex(raw)
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).clone()
