"""How a rank waits for a message: here wherever the system puts it. `engine.training.cores` knows better places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Waits:
    """What transports wait through. Threads of a rank may share one."""

    def also(self, threads: Sequence[int]) -> None:
        """Threads of this process, by their native numbers, that bring what is waited for."""

    def keep(self, wait: Callable[[], T]) -> T:
        """Call `wait`, which blocks, and return what it returns."""
        return wait()


ANYWHERE = Waits()
