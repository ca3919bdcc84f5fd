"""Atomic file writes into a run folder; UnwritableError when the disk is full or the folder is gone.

A file is written aside in the same folder, then renamed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MOST_DEPTH = 64  # of what is read: nothing that was written is nested as deep, and every level takes some stack


class UnwritableError(Exception):
    """A run folder that was deleted or made read-only while the run used it, or whose disk is full."""

    def __init__(self, path: Path, error: OSError) -> None:
        self.path = path
        super().__init__(f"{path.name} cannot be written into the folder {path.parent}: {error.strerror or error}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UnwritableError instead of an OSError in the context, which writes `path`."""
    try:
        yield
    except OSError as error:
        raise UnwritableError(path, error) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically, replacing what is there. Raises UnwritableError."""
    aside = path.with_name(
        f".{path.name}.{os.getpid()}.part"
    )  # jobs that run at the same time renew the same files of a sweep
    try:
        with writing(path):
            aside.write_bytes(content)
            aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Bring the entries of a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: Path, content: str) -> None:
    """Write `content` in UTF-8 to `path` atomically. Raises UnwritableError."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: object) -> None:
    """Write strict JSON atomically; a number that is not finite becomes null. Raises UnwritableError."""
    write_text(path, json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where there is none that can be read."""
    try:
        content = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and not _deeper(content, MOST_DEPTH) else None


def _deeper(content: Any, levels: int) -> bool:
    """Whether plain data is nested deeper than so many levels."""
    row = [content]
    for _ in range(levels):
        row = [item for each in row for item in (each.values() if isinstance(each, dict) else each)]
        row = [item for item in row if isinstance(item, dict | list)]
        if not row:
            return False
    return True


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
