"""Traced steps on their way into the event file, as documents for TensorBoard's tab: some as they come, and the last.

With each go the ideal and the predicted bubble as they are known by then, so that the three bubbles of a run that is
still going on can be seen in one chart, and histograms of its actions. They too are made of the chosen steps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.account.bubble import Account
from engine.account.measure import Measure, fractions
from engine.account.overlap import Overlap
from engine.account.records.clock_alignment import ClockAlignment
from engine.account.records.gather import Step
from engine.account.replay.waterfall import Waterfall
from engine.account.steady import SteadyMeasure
from engine.account.steps import document
from engine.categories import NAMES
from engine.job import Job
from engine.plan.timeline import Timeline
from engine.report.tensorboard import series
from engine.report.tensorboard.board import Board
from engine.report.tensorboard.curves import action_times


class Counted(NamedTuple):
    """A traced step that is in the means, and what was found of it.

    `timeline`: its spans, on the clock of rank 0; `waiting`: seconds, by replica, for slower ones.
    """

    step: Step
    timeline: Timeline
    account: Account
    waterfall: Waterfall | None
    overlap: Overlap | None
    waiting: Sequence[float]


class Documents:
    """Writes the documents of chosen steps to `board`, with the bubbles as `measure` knows them by then."""

    def __init__(self, job: Job, board: Board, measure: Measure | SteadyMeasure, clocks: ClockAlignment) -> None:
        self._job, self._board, self._measure, self._clocks = job, board, measure, clocks
        self._thinning, self._room = series.Thinning(), series.Room()
        self._left: Counted | None = None  # the latest step, where it was not chosen
        self._predicted: Timeline | None = None

    def add(self, counted: Counted) -> None:
        """Take the next traced step; it is written if it is chosen."""
        self._left = counted
        if self._thinning.keeps():
            self.finish()

    def finish(self) -> None:
        """Write the latest step: the last one of a run is never missing, but for its size."""
        if self._left is None:
            return
        counted, self._left = self._left, None
        self._point(counted.step.index, counted.timeline)
        if self._room.takes(len(counted.timeline)):
            self._write(counted)

    def _point(self, index: int, timeline: Timeline) -> None:
        bubbles = self._measure.result()
        assert bubbles is not None
        self._predicted = bubbles.simulated if self._measure.last_whole is timeline else None
        self._board.scalars({"bubble/ideal": bubbles.ideal, "bubble/predicted": bubbles.predicted}, index)
        self._board.histograms(action_times(timeline), index)

    def _write(self, counted: Counted) -> None:
        step, uncertainty = counted.step, self._clocks.uncertainty
        text = document(self._job, step.index, counted.timeline, counted.waterfall, self._predicted, uncertainty)
        shares = dict(zip(NAMES, fractions(counted.account.table).mean(axis=0).tolist(), strict=True))
        self._board.document(step.index, text, series.about(step.seconds, shares))
