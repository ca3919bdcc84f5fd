"""In which order the buckets of a rank are reduced: always the same, whichever has its gradients first.

A bucket starts when its own gradients are there and every bucket before it has started:

    order      a    b    c    d
    ready      2nd  4th  1st  3rd
    starts     2nd  4th  4th  4th       a at once when it is ready; b, c and d as soon as b is

Messages are matched by their order, and every rank issues them in this one, which follows from the model and the
placement alone. When a bucket starts depends on the program and on nothing else: never on how long anything took.
"""

from __future__ import annotations

from collections.abc import Callable


class Order:
    """Rounds of the same tasks, each run once per round in the order in which they were added."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], None]] = []
        self._ready: set[int] = set()
        self._next = 0

    def add(self, start: Callable[[], None]) -> int:
        """Add a task behind the others, before the first round; return its number."""
        self._tasks.append(start)
        return len(self._tasks) - 1

    def ready(self, number: int) -> None:
        """Let task `number` start: it does in its turn, and with it whatever waited only for it."""
        assert number >= self._next and number not in self._ready, "ready twice in one round"
        self._ready.add(number)
        while self._next in self._ready:
            self._ready.discard(self._next)
            task = self._tasks[self._next]
            self._next = (self._next + 1) % len(self._tasks)
            task()
