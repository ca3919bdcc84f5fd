"""When traced steps are looked at: as they come, as far as that takes a small share of the run; the others at its end.

Looking at a step (its account, its waterfall, curves, a document) takes the parent's processor, which the workers need.
So it may take SHARE of the time that the steps themselves take. Steps wait in a line until there is time for them: of
a short run nothing is left out, it is looked at when the workers are done. Where the line gets too long, every second
step leaves it, and from then on only every second one joins: of a long run as many are looked at as there is time for,
evenly spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

SHARE = 0.005  # of the time of a run's steps, in seconds of one processor
MOST_STEPS = 32  # that wait: so many looks at most is the last one behind
MOST_SPANS = 50_000  # of all that wait: 2 MB

T = TypeVar("T")


class TraceBudget(Generic[T]):
    """Limits the parent's processor time for traces while workers run; hands traced steps to `look` as it allows.

    Steps are looked at one after the other, in their order. `clock`: seconds that this thread has had a processor.
    """

    def __init__(self, look: Callable[[T], None], clock: Callable[[], float] = time.thread_time) -> None:
        self._look, self._clock = look, clock
        self._left = 0.0  # seconds that may be spent on looking
        self._traced, self._every = 0, 1  # every so many traced steps one joins the line
        self._line: dict[int, tuple[T, int]] = {}  # by the number of the traced step; with its spans
        self._newest: tuple[int, T, int] | None = None  # its number before it
        self._seen = -1  # the number of the last that was looked at

    def passed(self, seconds: float) -> None:
        """Add to the budget: a step of the run took so many seconds, traced or not."""
        self._left += SHARE * seconds

    def add(self, step: T, spans: int) -> None:
        """Take the next traced step, and look at as many as there is time for. `spans`: how many it has."""
        self._newest = self._traced, step, spans
        if self._traced % self._every == 0:
            self._line[self._traced] = step, spans
        self._traced += 1
        while self._line and self._left >= 0:
            begun = self._clock()
            self._next()
            self._left -= self._clock() - begun
        while len(self._line) > MOST_STEPS or (len(self._line) > 1 and self._spans() > MOST_SPANS):
            self._every *= 2
            self._line = {number: each for number, each in self._line.items() if number % self._every == 0}

    def finish(self) -> None:
        """Look at all that wait, and at the newest step in any case; for the end, when workers need no processor."""
        if self._newest is not None and self._newest[0] != self._seen:
            number, step, spans = self._newest
            self._line[number] = step, spans
        self._newest = None
        while self._line:
            self._next()

    def _next(self) -> None:
        self._seen = min(self._line)
        step, _ = self._line.pop(self._seen)
        self._look(step)

    def _spans(self) -> int:
        return sum(spans for _, spans in self._line.values())
