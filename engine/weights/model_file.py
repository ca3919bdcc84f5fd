"""model.safetensors: the whole model's weights, written aside and renamed once they are on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.files import UnwritableError, sync_folder
from engine.weights.names import listed

# What the format has a word for.
STORABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
    | {torch.float8_e4m3fn, torch.float8_e5m2}
)


def unstorable(state: Mapping[str, object]) -> str | None:
    """Say which entries of a state safetensors cannot hold, and why; None where it can hold all."""
    wrong = [
        f"{name} ({str(value.dtype).removeprefix('torch.')})" if isinstance(value, Tensor) else f"{name} (no tensor)"
        for name, value in state.items()
        if not isinstance(value, Tensor) or value.dtype not in STORABLE or value.layout is not torch.strided
    ]
    return listed(wrong) if wrong else None


def write_tensors(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to `path`; it is there as a whole, and on the disk, or not at all. Raises UnwritableError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # Copies: the format refuses tensors that share memory, as two names of one weight do.
        apart = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
        _save(apart, aside, metadata)
        aside.chmod(0o666 & path.parent.stat().st_mode)  # the library lets its owner alone read it
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise UnwritableError(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _save(state: dict[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    from safetensors import SafetensorError

    try:
        save_file(state, path, {"format": "pt", **metadata})
    except SafetensorError as error:  # its words for what the system said
        raise OSError(0, str(error)) from error
