"""engine.log: what every rank said, in order of arrival, each line with its time, level and rank."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TextIO

from engine.files import writing
from engine.telemetry.records import Record

NAME = "engine.log"


class RunLog:
    """Appends to `folder`/engine.log; the file appears with the first line and is complete after each."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file: TextIO | None = None

    def write(self, level: int, rank: int | None, logger: str, message: str) -> None:
        """`rank` is the world rank, None for the parent. Every line of a message is tagged. Raises UnwritableError."""
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {logging.getLevelName(level):<7} {tag(rank)} {logger}: "
        with writing(self._path):
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8", buffering=1)
            self._file.write("".join(head + line + "\n" for line in message.splitlines() or [""]))

    def close(self) -> None:
        """Flush and close engine.log; closing again changes nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            with writing(self._path):
                file.close()


def tag(rank: int | None) -> str:
    """The mark of a rank in front of its lines: `[rank 3]`, or `[parent]` for None."""
    return "[parent]" if rank is None else f"[rank {rank}]"


def line_of(record: Record) -> tuple[int, int | None, str, str] | None:
    """(level, rank, logger, message) of a record that belongs into the log."""
    meta = record.meta
    if record.kind == "log":
        return meta["level"], meta["rank"], meta["logger"], meta["message"]
    if record.kind == "error":
        return logging.ERROR, meta["rank"], "engine", f"{meta['type']}: {meta['message']}\n{meta['traceback']}"
    if record.kind == "ready":
        said = f"ready: process {meta['pid']}, device {meta['device']}, threads {meta['threads']}"
        return logging.INFO, meta["rank"], "engine", said
    if record.kind == "clock":
        said = f"clock {meta['offset_ns'] * 1e-6:+.3f} ms from rank 0's, +- {meta['uncertainty_ns'] * 1e-6:.3f} ms"
        return logging.INFO, meta["rank"], "engine", f"{said}, read with rank {meta['leader']}"
    return None
