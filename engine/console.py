"""What is printed, whatever became of the terminal: a run does not depend on anybody who reads its output.

A reader that has gone (`| head -1`, a closed terminal) makes every write fail. Training that took hours must not end
for that: the output goes nowhere from then on, and everything stays in the run folder. So do characters that the
terminal's encoding lacks: they are spelt out.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Forgiving:
    """A text stream whose writes do not fail: once one has, the stream leads nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _leave(self) -> None:
        """Also for what the stream still holds back, which the interpreter would write at its end."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def forgiving() -> Iterator[None]:
    """Let standard output and standard error of this process be forgiving; as they were afterwards."""
    _open_standard_files()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_forgiving(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _forgiving(stream: TextIO | None) -> Any:
    """Python has None for a stream that was closed before the start (`>&-`)."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Forgiving(stream or open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123  # open to the end


def _open_standard_files() -> None:
    """A number below 3 that is not open would go to the next file or socket, and to whoever prints there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # workers need them too
