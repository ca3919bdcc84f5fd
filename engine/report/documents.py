"""Traced steps on their way into the event file, as documents for TensorBoard's tab: some as they come, and the last.

With each go the ideal and the predicted bubble as they are known by then, so that the three bubbles of a run that is
still going on can be seen in one chart, and histograms of its actions. They too are made of the chosen steps only.
"""

from __future__ import annotations

from engine.job import Job
from engine.plan.timeline import Timeline
from engine.report import series
from engine.report.board import Board
from engine.report.bubble import NAMES, Account
from engine.report.clocks import Clocks
from engine.report.curves import action_times
from engine.report.gather import Step
from engine.report.measure import Measure, fractions
from engine.report.steady import SteadyMeasure
from engine.report.steps import document


class Documents:
    """Writes to `board`; `measure` has taken in a step before that is added here."""

    def __init__(self, job: Job, board: Board, measure: Measure | SteadyMeasure, clocks: Clocks) -> None:
        self._job, self._board, self._measure, self._clocks = job, board, measure, clocks
        self._thinning, self._room = series.Thinning(), series.Room()
        self._left: tuple[Step, Account] | None = None  # the latest step, where it was not chosen
        self._predicted: Timeline | None = None

    def add(self, step: Step, account: Account) -> None:
        """A traced step, and its account."""
        assert step.timeline is not None
        self._left = step, account
        if self._thinning.keeps():
            self.finish()

    def finish(self) -> None:
        """Write the latest step: the last one of a run is never missing, but for its size."""
        if self._left is None:
            return
        (step, account), self._left = self._left, None
        assert step.timeline is not None
        self._point(step)
        if self._room.takes(len(step.timeline)):
            self._write(step, account)

    def _point(self, step: Step) -> None:
        bubbles = self._measure.result()
        assert bubbles is not None
        self._predicted = bubbles.simulated if self._measure.last_whole is step.timeline else None
        self._board.scalars({"bubble/ideal": bubbles.ideal, "bubble/predicted": bubbles.predicted}, step.index)
        assert step.timeline is not None
        self._board.histograms(action_times(step.timeline), step.index)

    def _write(self, step: Step, account: Account) -> None:
        assert step.timeline is not None
        waterfall = self._measure.waterfall if self._measure.last is step.timeline else None
        text = document(self._job, step.index, step.timeline, waterfall, self._predicted, self._clocks.uncertainty)
        shares = dict(zip(NAMES, fractions(account.table).mean(axis=0).tolist(), strict=True))
        self._board.document(step.index, text, series.about(step.seconds, shares))
