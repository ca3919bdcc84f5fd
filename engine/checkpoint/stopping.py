"""Ending a run between two steps, saved: the parent asks, world rank 0 says after which step, all ranks end there.

    checkpoints/.stop       the parent has been told to end (SIGTERM, Ctrl-C)
    checkpoints/.stop-at    the number of steps done when all make a checkpoint and end

Rank 0 looks when a step is done, and names the end of the next one before it begins it. Every other rank needs rank 0's
forwards, or their gradients, to come to that end, so it finds the second file there. No message is sent for it. That
holds where all ranks see one file system at once, on one host.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine.checkpoint.names import FOLDER
from engine.files import UnwritableError, write_text


class Stop:
    """The two files of a run in `run_dir`."""

    def __init__(self, run_dir: str) -> None:
        root = Path(run_dir) / FOLDER
        self._asked, self._at = root / ".stop", root / ".stop-at"

    def ask(self) -> bool:
        """Ask the ranks to end; False where that cannot be written."""
        try:
            self._asked.parent.mkdir(exist_ok=True)
            write_text(self._asked, "")
        except (OSError, UnwritableError):
            return False
        return True

    def choose(self, step: int) -> None:
        """World rank 0: let all end after `step` steps, where the parent has asked."""
        if self._asked.exists():
            with contextlib.suppress(UnwritableError):
                write_text(self._at, str(step))

    def at(self) -> int | None:
        """After how many steps all end; None where nobody has asked."""
        try:
            return int(self._at.read_text())
        except (OSError, ValueError):
            return None

    def clear(self) -> None:
        """Forget what was asked."""
        for path in (self._asked, self._at):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
