"""manifest.json of a checkpoint: what is in it, as a schema, and a checksum over all of it.

    {"sha256": of the body, written compactly with sorted keys, "body": {...}}

`FORMAT` and `VERSION` stand first in the body. A version is raised when a reader of the one before would misread a
file; this module then reads both.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.files import read_json

NAME = "manifest.json"
FORMAT: Literal["hydra-pipeline-engine checkpoint"] = "hydra-pipeline-engine checkpoint"
VERSION = 1
TRANSIENT = "transient"


class DamagedError(ValueError):
    """A checkpoint that is not whole, or none of ours; the message names the file and what is wrong with it."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shard(_Strict):
    """A file of tensors beside the manifest."""

    file: str = Field(pattern=r"^rank-\d+\.safetensors$")
    nbytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Stored(_Strict):
    """A tensor of the state, or a part of one.

    `key` is the optimizer's word for it (momentum_buffer), or `TRANSIENT`: no part of the model's state_dict().
    `replica` and `copy_`: of buffers, whose they are. `span`: the elements [first, last) of the parameter, in the order
    of memory that `stride` gives.
    """

    kind: Literal["parameter", "buffer", "optimizer", "loss"]
    name: str
    key: str = ""
    file: str
    tensor: str  # its name in the file
    shape: tuple[int, ...]  # of the whole
    replica: int = 0
    copy_: int = 0
    span: tuple[int, int] | None = None
    stride: tuple[int, ...] | None = None


class Group(_Strict):
    """A parameter group of an optimizer: the names of its parameters, and its options as `plain.encode` gives them."""

    parameters: tuple[str, ...]
    options: dict[str, Any]


class Update(_Strict):
    """What a rank's optimizer and scheduler keep besides tensors. `state`: parameter -> key -> value."""

    groups: tuple[Group, ...]
    scheduler: Any
    state: dict[str, dict[str, Any]]


class Loader(_Strict):
    """What the order of samples follows from."""

    seed: int
    samples: int
    global_batch_size: int
    shuffle: bool
    drop_last: bool


class Manifest(_Strict):
    """The body of manifest.json.

    `step`: optimizer steps done, `samples`: consumed by them. `extra`: state of layers that is no tensor. `best_loss`:
    the lowest of the evaluations so far. `progress`: what the summary of a resumed run takes over.
    """

    format: Literal["hydra-pipeline-engine checkpoint"]
    version: int
    step: int = Field(ge=0)
    samples: int = Field(ge=0)
    epoch: int = Field(ge=0)
    loader: Loader
    shards: tuple[Shard, ...]
    tensors: tuple[Stored, ...]
    updates: tuple[Update, ...]
    extra: dict[str, Any]
    best_loss: float | None
    progress: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, str]

    def written(self) -> bytes:
        """The bytes of the file."""
        body = json.loads(json.dumps(self.model_dump(mode="json")))  # keys that are numbers are words from now on
        return json.dumps({"sha256": _digest(body), "body": body}).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint's folder. Raises DamagedError."""
    path = folder / NAME
    if not path.is_file():
        raise DamagedError(f"{folder} has no {NAME}: it is no checkpoint, or was not finished")
    content = read_json(path)
    if content is None or set(content) != {"sha256", "body"} or not isinstance(content["body"], dict):
        raise DamagedError(f"{path} is torn, or not a checkpoint's")
    body = content["body"]
    if content["sha256"] != _digest(body):
        raise DamagedError(f"{path} is not what was written: its checksum differs")
    if body.get("format") != FORMAT:
        raise DamagedError(f"{path} is of another program: format {body.get('format')!r:.60}")
    if body.get("version") != VERSION:
        raise DamagedError(
            f"{path} has version {body.get('version')!r:.20}, and this engine reads version {VERSION}: use the engine "
            "that wrote it, and take its weights over with engine.export and init.weights"
        )
    try:
        return Manifest.model_validate(body)
    except (ValidationError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "nested too deep"}
        where = ".".join(map(str, first["loc"]))
        raise DamagedError(f"{path}: {where or 'the body'}: {first['msg']}") from error


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
