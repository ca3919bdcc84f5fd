"""Files of weights, whatever wrote them: names and shapes at once, a tensor when it is asked for.

| what                                     | told by                                             |
|------------------------------------------|-----------------------------------------------------|
| safetensors                              | a header of JSON                                    |
| torch.save of tensors                    | a zip file, or pickle's first byte                  |
| a folder of shards, as Hugging Face cuts | *.safetensors.index.json or *.bin.index.json        |
| a run's folder, or any with one file     | model.safetensors, or the one file of such a name   |

torch's files are read with `weights_only`: nothing in them is called. ValueError for whatever cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import said
from engine.files import read_json
from engine.weights.names import MODEL, Shape, listed

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
INSIDE = ("state_dict", "model_state_dict", "model")  # where checkpoints of others keep the model's state


class WeightFile:
    """Tensors by name in one safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(path, framework="pt") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
                self.shapes: dict[str, Shape] = {name: tuple(part.get_shape()) for name, part in parts.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is not a whole safetensors file: {said(error)}") from error

    def read(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names."""
        with safe_open(self._path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


class StateFile:
    """Tensors by name in one file of torch.save, mapped into memory where its format allows that."""

    def __init__(self, path: Path) -> None:
        self._state = _tensors(path, _load(path))
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in self._state.items()}

    def read(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names."""
        for name in names:
            yield name, self._state[name]


class Shards:
    """Tensors by name over several files of a folder, as an index says."""

    def __init__(self, index: Path) -> None:
        content = read_json(index) or {}
        placed = content.get("weight_map")
        if not isinstance(placed, dict) or not placed or not all(isinstance(v, str) for v in placed.values()):
            raise ValueError(f'{index} is not an index of shards: it has no "weight_map" of names to files')
        outside = [name for name in placed.values() if PurePath(name).name != name]
        if outside:
            raise ValueError(f"{index} names files outside its folder: {listed(outside)}")
        self._files = {name: _file(index.parent / name) for name in dict.fromkeys(placed.values())}
        self._placed: dict[str, str] = placed
        lost = [name for name, file in placed.items() if name not in self._files[file].shapes]
        if lost:
            raise ValueError(f"{index} places tensors in files that do not have them: {listed(lost)}")
        self.shapes: dict[str, Shape] = {name: self._files[file].shapes[name] for name, file in placed.items()}

    def read(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names, file by file."""
        for file, source in self._files.items():
            yield from source.read([name for name in names if self._placed[name] == file])


Source = WeightFile | StateFile | Shards


def open_weights(path: Path) -> Source:
    """Open a file or a folder of weights."""
    if path.is_file():
        return _indexed(path) if path.name.endswith(".index.json") else _file(path)
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such file or folder of weights")
    for kind in ("safetensors", "bin"):
        if indices := sorted(path.glob(f"*.{kind}.index.json")):
            return _indexed(indices[0])
    if (path / MODEL).is_file():
        return _file(path / MODEL)
    found = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
    if len(found) == 1:
        return _file(found[0])
    several = f"several files ({listed([each.name for each in found])}) and no index of them" if found else "none"
    raise ValueError(
        f"{path}: of the files that a folder of weights has (an index.json, {MODEL}, or one file that "
        f"ends in {', '.join(SUFFIXES)}) there is {several}"
    )


def _indexed(path: Path) -> Shards:
    return Shards(path)


def _file(path: Path) -> WeightFile | StateFile:
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if head[:2] == b"PK" or head[:1] == b"\x80":
        return StateFile(path)
    return WeightFile(path)


def _load(path: Path) -> Any:
    """The content of a file of torch.save."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception:  # noqa: BLE001  # the format before torch 1.6, or a file that cannot be mapped
            with path.open("rb") as file:  # a path that ends in .safetensors would be read as such
                return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(
            f"{path} cannot be read as tensors alone ({first:.200}): torch.save the model's state_dict() by itself, or "
            "write it as safetensors"
        ) from error


def _tensors(path: Path, content: Any) -> dict[str, Tensor]:
    """The state in a checkpoint: the whole content, or what lies under one of the usual keys."""
    for inside in ("", *INSIDE):
        state = content.get(inside) if inside and isinstance(content, Mapping) else content
        if isinstance(state, Mapping):
            found = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
            if found and len(found) * 2 > len(state):
                return found
    raise ValueError(
        f"{path} holds no tensors by name, neither at its top nor under {', '.join(INSIDE)}: torch.save the model's "
        "state_dict() by itself"
    )
