"""Where each rank is in its program, in memory that the parent can read after the rank was killed.

A process that is killed cannot report where it was. So the executor writes the packed action (`Action.pack`) it begins
into one int64 of its own; under `launch=processes` that integer lies in memory shared with the parent.
"""

from __future__ import annotations

import threading
from collections.abc import MutableSequence

from engine.plan.actions import Action

NOWHERE = -1
_own = threading.local()  # ranks may be threads of one process


def here() -> MutableSequence[int] | memoryview:
    """The calling rank's position as a sequence of one integer: `here()[0] = action.pack()`."""
    if not hasattr(_own, "cell"):
        _own.cell = [NOWHERE]
    return _own.cell


def use(cell: MutableSequence[int] | memoryview) -> None:
    """Let the calling rank's position live in `cell`."""
    cell[0] = NOWHERE
    _own.cell = cell


def decode(code: int) -> Action | None:
    """The action of a position, or None where the rank had not begun any."""
    return None if code == NOWHERE else Action.unpack(code)
