"""The folder of a run's checkpoints: which there are, which are whole, how one appears and how old ones go.

    checkpoints/.step-000000010.part/     ranks write their shards here
    checkpoints/step-000000010/           one rename makes it visible, when all shards and the manifest are on the disk
    checkpoints/.step-000000005.gone/     renamed first, then removed: half a checkpoint never has a checkpoint's name

Only the run's parent makes and removes checkpoints; ranks write their own shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from engine.checkpoint.manifest import NAME, DamagedError, Manifest, Shard, read_manifest
from engine.files import sync_folder

CHUNK_BYTES = 1 << 22


class Checkpoint(NamedTuple):
    """A checkpoint that was found whole."""

    folder: Path
    manifest: Manifest


def folder_of(root: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return root / f"step-{step:09d}"


def aside_of(root: Path, step: int) -> Path:
    """Where it is written."""
    return root / f".step-{step:09d}.part"


def steps_of(root: Path) -> list[int]:
    """Steps of the checkpoints that are there, the newest first; whether they are whole is not looked at."""
    try:
        names = [each.name for each in root.iterdir()]
    except OSError:
        return []
    found = (re.fullmatch(r"step-(\d{9,})", name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def checksum(path: Path) -> tuple[int, str]:
    """(bytes, SHA-256) of a file as it is read back."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            nbytes += len(chunk)
    return nbytes, digest.hexdigest()


def whole(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest and check every shard. Raises DamagedError."""
    manifest = read_manifest(folder)
    for shard in manifest.shards:
        _check(folder / shard.file, shard)
    return Checkpoint(folder, manifest)


def _check(path: Path, shard: Shard) -> None:
    try:
        nbytes, digest = checksum(path)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from error
    if nbytes != shard.nbytes:
        raise DamagedError(f"{path} has {nbytes:,} bytes of {shard.nbytes:,}")
    if digest != shard.sha256:
        raise DamagedError(f"{path} is not what was written: its checksum differs")


def newest(root: Path, passed_over: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest whole checkpoint; `passed_over` is told why newer ones are not taken."""
    for step in steps_of(root):
        try:
            found = whole(folder_of(root, step))
            if found.manifest.step != step:
                raise DamagedError(f"{found.folder} holds step {found.manifest.step}, not what its name says")
            return found
        except DamagedError as error:
            passed_over(str(error))
    return None


def commit(root: Path, manifest: Manifest) -> Path:
    """Make the checkpoint visible whose shards lie aside, and on the disk. Raises OSError."""
    aside, folder = aside_of(root, manifest.step), folder_of(root, manifest.step)
    with (aside / NAME).open("wb") as file:
        file.write(manifest.written())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(aside)
    if folder.exists():  # of an attempt before this one, or a damaged one
        discard(folder)
    aside.rename(folder)
    sync_folder(root)
    return folder


def discard(folder: Path) -> None:
    """Remove a folder of ours, whole or not; it loses its name first."""
    gone = folder.with_name(f".{folder.name.strip('.').removesuffix('.part')}.gone")
    _remove(gone)
    try:
        folder.rename(gone)
    except OSError:
        gone = folder
    _remove(gone)


def sweep(root: Path) -> None:
    """Remove what a run that was killed has left half-written or half-removed."""
    with contextlib.suppress(OSError):
        for each in root.iterdir():
            if re.fullmatch(r"\.step-\d+\.(part|gone)", each.name):
                _remove(each)


def _remove(path: Path) -> None:
    """Remove a folder or a file, as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def prune(root: Path, keep: int, spare: Collection[int]) -> list[int]:
    """Remove all but the newest `keep` checkpoints and those of steps to `spare`; return the steps removed."""
    old = [step for step in steps_of(root)[keep:] if step not in spare]
    for step in old:
        discard(folder_of(root, step))
    return old
