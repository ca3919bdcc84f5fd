"""What a checkpoint holds, by name: each tensor is read when it is asked for, and parts are put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint import plain
from engine.checkpoint.manifest import TRANSIENT, DamagedError, Manifest, Stored, Update, read_manifest
from engine.errors import said


class Reader:
    """A checkpoint in `folder`, whose shards were checked before. ValueError for what it does not have."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder, self.manifest = folder, manifest or read_manifest(folder)
        self.extra: dict[str, Any] = self.manifest.extra
        self._files: dict[str, Any] = {}
        self._by_name: dict[tuple[str, str], list[Stored]] = {}
        for entry in self.manifest.tensors:
            self._by_name.setdefault((entry.kind, entry.name), []).append(entry)
        self._update_of: dict[str, Update] = {}
        for update in self.manifest.updates:
            for group in update.groups:
                for name in group.parameters:
                    self._update_of.setdefault(name, update)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter."""
        return {name: found[0].shape for (kind, name), found in self._by_name.items() if kind == "parameter"}

    def state(self) -> dict[str, Tensor]:
        """The whole model's parameters and buffers, as `model.safetensors` holds them: buffers of the first copies."""
        found: dict[str, Tensor] = {}
        for (kind, name), entries in self._by_name.items():
            if kind in ("parameter", "buffer") and entries[0].key != TRANSIENT:
                first = min(entries, key=lambda entry: (entry.replica, entry.copy_))
                found[name] = self._read(first)
        return found

    def parameter(self, name: str, shape: Sequence[int]) -> Tensor:
        """A parameter of this shape."""
        found = self._by_name.get(("parameter", name))
        if not found:
            raise ValueError(f"{self.folder} has no parameter {name}: it is of another model")
        if found[0].shape != tuple(shape):
            raise ValueError(f"{self.folder}: {name} is {found[0].shape}, and in this model {tuple(shape)}")
        return self._read(found[0])

    def buffer(self, kind: str, name: str, shape: Sequence[int], replica: int, copy: int) -> Tensor | None:
        """A buffer of a replica and copy, of the first ones where these were not stored; None where there is none."""
        found = {(entry.replica, entry.copy_): entry for entry in self._by_name.get((kind, name), [])}
        entry = found.get((replica, copy)) or found.get((0, copy)) or next(iter(found.values()), None)
        return None if entry is None or entry.shape != tuple(shape) else self._read(entry)

    def optimizer(self, name: str) -> dict[str, Any]:
        """What an optimizer keeps of a parameter: key -> whole tensor, or plain data."""
        found: dict[str, Any] = {}
        by_key: dict[str, list[Stored]] = {}
        for entry in self._by_name.get(("optimizer", name), []):
            by_key.setdefault(entry.key, []).append(entry)
        for key, entries in by_key.items():
            parts = [entry for entry in entries if entry.span is not None]
            found[key] = self._together(name, key, parts) if parts else self._read(entries[0])
        if name in self._update_of:
            found |= {key: plain.decode(value) for key, value in self._update_of[name].state.get(name, {}).items()}
        return found

    def options(self, names: Sequence[str]) -> dict[str, Any]:
        """The options of the parameter group in which these were. ValueError where they were in several."""
        found = [
            group.options
            for name in names
            if name in self._update_of
            for group in self._update_of[name].groups
            if name in group.parameters
        ]
        if not found:
            raise ValueError(f"{self.folder} has no optimizer of {', '.join(names[:5])}: it trained other parameters")
        if any(options != found[0] for options in found):
            raise ValueError(
                f"the optimizer puts into one group what had different options in {self.folder}: give it the groups "
                "that it had, or start from the weights alone with init.weights"
            )
        return {key: plain.decode(value) for key, value in found[0].items()}

    def scheduler(self, names: Sequence[str]) -> dict[str, Any] | None:
        """The state of the scheduler of the optimizer that had the first of these; None where there was none."""
        update = next((self._update_of[name] for name in names if name in self._update_of), None)
        state = None if update is None else plain.decode(update.scheduler)
        return state if isinstance(state, dict) else None

    def _together(self, name: str, key: str, parts: Sequence[Stored]) -> Tensor:
        shape, stride = parts[0].shape, parts[0].stride
        covered, flat = 0, None
        for entry in sorted(parts, key=lambda each: each.span or (0, 0)):
            assert entry.span is not None
            value = self._read(entry)
            if flat is None:
                flat = torch.empty(math.prod(shape), dtype=value.dtype)
            if entry.span[0] > covered or entry.span[1] - entry.span[0] != value.numel():
                break
            flat[entry.span[0] : entry.span[1]] = value.flatten()
            covered = max(covered, entry.span[1])
        if flat is None or stride is None or covered != flat.numel():
            raise DamagedError(f"{self.folder} does not hold all parts of the optimizer's {key} of {name}")
        return flat.as_strided(shape, stride)

    def _read(self, entry: Stored) -> Tensor:
        try:
            if entry.file not in self._files:
                self._files[entry.file] = safe_open(self.folder / entry.file, framework="pt")
            tensor: Tensor = self._files[entry.file].get_tensor(entry.tensor)
        except (SafetensorError, OSError) as error:
            raise DamagedError(f"{self.folder / entry.file}: {entry.name} cannot be read: {said(error)}") from error
        return tensor
