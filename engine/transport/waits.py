"""How a rank waits for a message: here wherever the system puts it. `engine.training.cores` knows better places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Waits:
    """How transports wait; the base class waits where the system puts the thread."""

    def also(self, threads: Sequence[int]) -> None:
        """Take note of threads of this process, by native number, that bring what is waited for."""

    def keep(self, wait: Callable[[], T]) -> T:
        """Call `wait`, which blocks, and return what it returns."""
        return wait()


ANYWHERE = Waits()
