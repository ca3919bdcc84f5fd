"""Nested plain data with tensors in it, as bytes: JSON for the nesting, the tensors' own bytes behind it.

    [8 bytes: length of the JSON | JSON | padding to 64 | tensor 0 | padding | tensor 1 | ...]

What arrives can only be data: nothing is unpickled. A tensor stands in the JSON as {"tensor": [place, dtype, shape,
strides]}: fused optimizers go through memory, so a momentum must stay laid out as its parameter is. Tuples and
dictionaries whose keys are no texts are written out as such.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from torch import Tensor

from engine.errors import a_type
from engine.gradients.layout import dense_strides

_LINE = 64


def pack(value: Any) -> bytes:
    """Serialize nested plain data; ValueError for what is no tensor, number, text, list or dictionary."""
    parts: list[bytes] = []
    text = json.dumps(_plain(value, parts)).encode()
    return b"".join(_padded(part) for part in (struct.pack("<q", len(text)) + text, *parts))


def unpack(data: bytes) -> Any:
    """Read what `pack` wrote; tensors are on the CPU."""
    (length,) = struct.unpack_from("<q", data)
    body = memoryview(data)[len(_padded(data[: 8 + length])) :]
    return _restored(json.loads(data[8 : 8 + length]), body)


def _padded(part: bytes) -> bytes:
    return part.ljust(-(-len(part) // _LINE) * _LINE, b"\0")


def _plain(value: Any, parts: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        place = sum(len(_padded(part)) for part in parts)
        strides = dense_strides(value)
        laid = torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value.detach())
        parts.append(laid.as_strided((laid.numel(),), (1,)).view(torch.uint8).numpy().tobytes())
        return {"tensor": [place, str(value.dtype).removeprefix("torch."), list(value.shape), list(strides)]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, parts), _plain(item, parts)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, parts) for item in value]}
    if isinstance(value, list):
        return [_plain(item, parts) for item in value]
    raise ValueError(
        f"{a_type(value)} cannot be sent: only tensors, numbers, texts, lists, tuples and dictionaries can"
    )


def _restored(value: Any, body: memoryview) -> Any:
    if isinstance(value, list):
        return [_restored(item, body) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        place, name, shape, strides = content
        dtype = getattr(torch, name)
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        raw = bytearray(body[place : place + count * dtype.itemsize])
        return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)
    if kind == "tuple":
        return tuple(_restored(item, body) for item in content)
    return {_restored(key, body): _restored(item, body) for key, item in content}
