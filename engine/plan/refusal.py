"""How a program is refused: which action, what blocks it, and the grid with an arrow."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from engine.plan.dependencies import Flat
from engine.plan.views.grid import grid


class InvalidProgram(ValueError):  # noqa: N818
    """A program that would not run, or not compute what it should.

    `action` is the one at fault, `blocker` the one it directly waits for or collides with, both as text.
    """

    def __init__(self, message: str, action: str, blocker: str) -> None:
        super().__init__(message)
        self.action = action
        self.blocker = blocker


def refuse(flat: Flat, at: int | None, action: object, blocker: object, sentence: str) -> NoReturn:
    """Raise InvalidProgram; the arrow points at the action of index `at`, if it stands anywhere."""
    mark = None if at is None else flat.position(at)
    where = "" if mark is None else f"rank {mark[0]}, position {mark[1]}: "
    message = f"program {flat.program.name} is invalid. {where}{sentence}\n\n{grid(flat.program, mark)}\n"
    raise InvalidProgram(message, str(action), str(blocker))


def first(mask: npt.NDArray[np.bool_]) -> int | None:
    """Return the first place at which a mask holds (in C order), or None."""
    flat = mask.ravel()
    index = int(np.argmax(flat)) if len(flat) else 0
    return index if len(flat) and flat[index] else None


def place(flat: Flat, index: int) -> str:
    """Say where an action stands."""
    rank, position = flat.position(index)
    return f"position {position} of rank {rank}"
