"""When traced steps are looked at: as they come, as far as that takes a small share of the run; the others at its end.

Looking at a step (its account, its waterfall, curves, a document) takes the parent's processor, which the workers need.
So it may take SHARE of the time that the steps themselves take. Whenever something of that is left, the newest step is
looked at. Of those that are not, some wait until the workers are done, spread evenly over the run. Then the ones after
the last that was looked at are looked at too, so that no curve folds back; earlier ones count in the means.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.report.bubble import Account
from engine.report.gather import Step

SHARE = 0.005  # of the time of a run's steps, in seconds of one processor
MOST_STEPS = 64  # that wait
MOST_SPANS = 100_000  # of all that wait: 3 MB


class Looks:
    """`look(step, account)` does everything, the account being None where the step is not in the means yet;
    `count(step)` only adds it to the means, in any order. `clock`: seconds that this thread has had a processor.
    """

    def __init__(
        self,
        look: Callable[[Step, Account | None], None],
        count: Callable[[Step], object],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._look, self._count, self._clock = look, count, clock
        self._left = 0.0  # seconds that may be spent on looking
        self._shown = -1  # the index of the last step that was looked at
        self._traced, self._every = 0, 1  # every so many traced steps one waits
        self._waiting: dict[int, Step] = {}  # by the number of the traced step
        self._newest: tuple[Step, Account | None] | None = None  # where it was not looked at

    def add(self, step: Step, account: Account | None = None) -> None:
        """The next step of the run, traced or not. With its account it is in the means, and only the newest waits."""
        self._left += SHARE * step.seconds
        if step.timeline is None:
            return
        self._traced += 1
        if self._left >= 0:
            begun = self._clock()
            self._show(step, account)
            self._left -= self._clock() - begun
            self._newest = None
            return
        self._newest = step, account
        if account is None and self._traced % self._every == 0:
            self._waiting[self._traced] = step
            while len(self._waiting) > MOST_STEPS or (len(self._waiting) > 1 and self._spans() > MOST_SPANS):
                self._every *= 2
                self._waiting = {number: each for number, each in self._waiting.items() if number % self._every == 0}

    def finish(self) -> None:
        """Nothing more will come, and nobody else needs the processor."""
        waiting, newest = list(self._waiting.values()), self._newest
        self._waiting, self._newest = {}, None
        for step in waiting:
            if step.index < self._shown:
                self._count(step)
        for step in waiting:
            if step.index > self._shown:
                self._show(step, None)
        if newest is not None and newest[0].index > self._shown:
            self._show(*newest)

    def _show(self, step: Step, account: Account | None) -> None:
        self._shown = step.index
        self._look(step, account)

    def _spans(self) -> int:
        return sum(len(step.timeline) for step in self._waiting.values() if step.timeline is not None)
