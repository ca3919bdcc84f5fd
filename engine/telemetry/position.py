"""Where each rank is in its program: on what it raises, and in memory that the parent can read after it was killed.

A process that is killed cannot report where it was. So the executor writes the action it begins into one int64 of its
own, packed, with a bit that tells evaluation from training; under `launch=processes` that integer lies in memory shared
with the parent.

An exception carries its place in its `__dict__`, which it has whatever its class is: one with a `__setattr__` of its
own, or with attributes called `stage` or `action`, is located all the same.
"""

from __future__ import annotations

import threading
from collections.abc import MutableSequence
from typing import NamedTuple

from engine.plan.actions import Action

NOWHERE = -1
EVALUATING = 1 << 62  # added to a packed action
_KEY = "engine.place"
_own = threading.local()  # ranks may be threads of one process


def here() -> MutableSequence[int] | memoryview:
    """The calling rank's position, one integer: `here()[0] = action.pack()`, plus EVALUATING in an evaluation."""
    if not hasattr(_own, "cell"):
        _own.cell = [NOWHERE]
    return _own.cell


def use(cell: MutableSequence[int] | memoryview) -> None:
    """Let the calling rank's position live in `cell`."""
    cell[0] = NOWHERE
    _own.cell = cell


class Place(NamedTuple):
    """Where an exception came from. What is not known is None."""

    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None  # as it prints, or what the rank did besides its program


def named(action: Action | str, evaluating: bool) -> str:
    """An action as messages name it."""
    return f"{action} of an evaluation" if evaluating else str(action)


def decode(code: int) -> Place | None:
    """The place that a position stands for; None where the rank had not begun any action."""
    if code == NOWHERE:
        return None
    action = Action.unpack(code & ~EVALUATING)
    return Place(action.stage, action.microbatch, named(action, bool(code & EVALUATING)))


def locate(error: BaseException, place: Place) -> None:
    """Note on an exception where it happened; the innermost place stays."""
    vars(error).setdefault(_KEY, place)


def place_of(error: BaseException) -> Place:
    """Where an exception happened, as far as it is known."""
    found: Place = vars(error).get(_KEY, Place())
    return found
