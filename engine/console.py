"""Standard output that never fails: a run goes on when the reader of its output has gone.

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
        """Write `text`; return how many characters were taken, all of them where the stream has failed."""
        try:
            return self._stream.write(text)
        except OSError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        """Flush the stream; a failure makes it lead nowhere instead of raising."""
        try:
            self._stream.flush()
        except OSError:
            self._leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _leave(self) -> None:
        """Point the file descriptor to /dev/null, so that buffered text that is written later does not fail either."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def forgiving() -> Iterator[None]:
    """Make standard output and standard error of this process never fail while the context lasts."""
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
    """Wrap a stream, or /dev/null where it was closed before the start (`>&-`), for which Python has None."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Forgiving(stream or open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123  # open to the end


def _open_standard_files() -> None:
    """Open /dev/null for each closed descriptor below 3; the next file or socket would get that number, and prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # workers need them too
