"""The recorder: takes in what workers tell and leaves the run folder complete, however the run ends.

    step ─────► all ranks' records of a step ──► totals ──► event file, progress bar
                traced, as time allows ────────► account, waterfall ──► event file
    evaluation ► all replicas' ────────────────► event file, a line
    log, error, ready ─────────────────────────► engine.log; warnings also on the console
    finish ───► summary.json, report.txt, trace.json, timeline and waterfall as PNG and SVG, TensorBoard's text, images
                and HParams session

Only sums and some traced steps are kept (`trace_budget.py`), so memory does not grow with the number of spans.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from engine.account.barrier import Barrier
from engine.account.cause import diagnose
from engine.account.measure import Bubbles, Measure
from engine.account.path import critical_path
from engine.account.records.clock_alignment import ClockAlignment
from engine.account.records.gather import Evaluations, Recorded, Step, Steps
from engine.account.records.nan_watch import LossWatch
from engine.account.records.pushes import Staleness
from engine.account.steady import SteadyMeasure
from engine.files import write_bytes, write_json, write_text
from engine.job import Job
from engine.plan.timeline import Timeline
from engine.predict.costs import COSTS_NAME, MeasuredCosts
from engine.report.earlier import Earlier
from engine.report.log import RunLog, line_of, tag
from engine.report.perfetto import write_trace
from engine.report.pictures.figure import Picture, preload
from engine.report.pictures.timeline import SMALL, Panel, draw
from engine.report.pictures.waterfall import draw_bars
from engine.report.progress import ProgressBar
from engine.report.summary import Totals
from engine.report.tensorboard import curves
from engine.report.tensorboard.board import Board
from engine.report.tensorboard.documents import Counted, Documents
from engine.report.tensorboard.hparams import METRICS, hparams, results
from engine.report.tensorboard.series import CURVES, Thinning
from engine.report.tensorboard.trace_budget import TraceBudget
from engine.report.text import CLOCKS, PATH, clocks_text, closing, path_text, report
from engine.tables import percent
from engine.telemetry.records import Record


class Recorder:
    """Writes a run folder and the console from records: call it with every record, then `finish` once.

    `console` is sys.stdout unless given. `console_level`: log lines of this level (logging's numbers) and above are
    shown on the console too. `earlier`: of a run that goes on, what it takes over.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path | str,
        *,
        progress: bool = True,
        console: TextIO | None = None,
        console_level: int = logging.WARNING,
        earlier: Earlier | None = None,
    ) -> None:
        self.job, self.folder = job, Path(run_dir)
        self._console_level = console_level
        self._log = RunLog(self.folder)
        self._board = Board(self.folder)
        self._progress = ProgressBar(job, console or sys.stdout, progress)
        self._steps, self._evaluations = Steps(job), Evaluations(job)
        self._totals, self._measure = Totals(job, earlier), SteadyMeasure(job) if job.windows else Measure(job)
        self._clocks = ClockAlignment(job.world, job.ranks)
        apart = job.settings.data_parallel.asynchronous
        self._barrier = Barrier(job) if job.replicas > 1 and not apart else None
        self._staleness = Staleness(job) if apart else None
        self._costs = None if job.windows or apart else MeasuredCosts(job)
        self._documents = Documents(job, self._board, self._measure, self._clocks)
        self._looks = TraceBudget(self._look)
        self._by_rank, self._looked = (Thinning(CURVES) for _ in range(2))
        self._raw: Recorded | None = None  # the last traced step, each rank on its own clock
        self._watch = LossWatch(job.settings.train.stop_on_nan)
        self._summary: dict[str, Any] | None = None
        if earlier is not None:
            self._board.take_over(earlier.kept(whole=job.start == self._progress.total))
            self._board.flush()
            if earlier.events is not None:
                earlier.events.unlink(missing_ok=True)  # exactly one event file of a run

    def progress(self) -> dict[str, Any]:
        """What a resumed run takes over into its summary."""
        return {"first_loss": self._totals.first_loss}

    def __call__(self, record: Record) -> None:
        """Take in one record of a worker, whatever its kind."""
        if record.kind == "step":
            if step := self._steps.add(record):
                self._step(step)
        elif record.kind == "evaluation":
            if evaluation := self._evaluations.add(record):
                self._totals.evaluation = evaluation
                self._board.scalars(
                    {"eval/loss": evaluation.loss, "eval/accuracy": evaluation.accuracy}, evaluation.step
                )
                self._board.flush()
                self._progress.say(str(evaluation))
        elif record.kind == "ready" and self._costs is not None:
            self._costs.threads = record.meta["threads"]
        elif record.kind == "memory":
            self._totals.add_memory(record.meta)
        elif record.kind == "checkpoint":
            self._totals.add_checkpoint(record.meta)
        elif record.kind == "clock":
            self._clocks.add(record)
        if line := line_of(record):
            self._say(*line, shown=record.kind == "log")

    def finish(self, status: str, error: str | None = None) -> dict[str, Any]:
        """Write everything, print the report, close all files; returns the content of summary.json.

        `status`: completed, failed or interrupted. A second call changes nothing and returns the same.
        """
        if self._summary is None:
            self._progress.close()
            with ExitStack() as last:  # in reverse: each is done, whatever the others raise
                last.callback(self._log.close)
                last.callback(self._board.close)
                last.callback(self._conclude, status, error)
                self._looks.finish()
                self._documents.finish()
        assert self._summary is not None
        return self._summary

    def _say(self, level: int, rank: int | None, logger: str, message: str, shown: bool = True) -> None:
        """A line for the log, and for the console where it is to be `shown` there and grave enough."""
        self._log.write(level, rank, logger, message)
        if shown and level >= self._console_level:
            self._progress.say(f"{logging.getLevelName(level)} {tag(rank)} {message}")

    # -- while it runs ---------------------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        if self._totals.steps == 0:
            self._begin(step.lr)
        self._totals.add(step)
        if self._staleness is not None:
            self._staleness.add(step.replicas)
        self._board.scalars(curves.of_step(step) | (curves.of_ranks(step) if self._by_rank.keeps() else {}), step.index)
        self._looks.passed(step.seconds)
        if step.recorded is not None:
            self._raw = step.recorded
            # Of an asynchronous schedule what an update waits for may lie in the one before: each is counted.
            counted = self._counted(step) if self.job.windows else None
            self._looks.add(counted or step, len(step.recorded))
        if self._totals.steps == self._progress.total:
            preload()  # ranks are evaluating, saving and ending meanwhile
        if self._progress.step(step):
            self._board.flush()
        if warning := self._watch.look(step):
            self._say(logging.WARNING, None, __name__, warning)

    def _look(self, traced: Step | Counted) -> None:
        """All that is told of a traced step."""
        counted = self._counted(traced) if isinstance(traced, Step) else traced
        if self._looked.keeps():
            values: dict[str, float | None] = {**curves.of_account(self.job, counted.account)}
            values |= curves.of_waterfall(counted.waterfall) | curves.of_overlap(counted.overlap)
            values |= curves.of_barrier(counted.waiting)
            self._board.scalars(values, counted.step.index)
        self._documents.add(counted)

    def _counted(self, step: Step) -> Counted:
        """A step on the clock of rank 0, in the means from now on."""
        assert step.recorded is not None
        timeline, measure = self._clocks.aligned(step.recorded.timeline), self._measure
        account = measure.add(timeline, step.index)
        assert measure.shown is not None
        waiting = [] if self._barrier is None else self._barrier.add(timeline)
        if self._costs is not None:
            self._costs.add(step, measure.shown, account, measure.observed)
        return Counted(step, measure.shown, account, measure.waterfall, measure.overlap, waiting)

    def _begin(self, lr: float | None) -> None:
        self._board.begin_session(hparams(self.job, lr), METRICS)
        self._board.layout(curves.layout(self.job))

    def _data_parallel(self) -> dict[str, Any] | None:
        """What summary.json says of the replicas; None where there is one."""
        if self._staleness is not None:
            return self._staleness.summary()
        return None if self._barrier is None else {"mode": "sync", "barrier": self._barrier.result()}

    # -- at the end ------------------------------------------------------------------------------------------------

    def _conclude(self, status: str, error: str | None) -> None:
        bubbles = self._measure.result()
        self._summary = self._totals.summary(status, error, bubbles, self._watch.began, self._data_parallel())
        with ExitStack() as last:
            if self._totals.steps:
                cause = diagnose(self.job, bubbles)
                told = closing(self.job, self._summary, bubbles, cause, self.folder)
                last.callback(self._progress.say, "\n" + told)
            write_json(self.folder / "summary.json", self._summary)
            if self._totals.steps:
                self._leave(self._summary, bubbles, cause)
            elif status == "failed":
                self._begin(None)  # the table of a sweep shows the jobs that failed, too
            self._board.end_session(status)

    def _leave(self, summary: dict[str, Any], bubbles: Bubbles | None, cause: str) -> None:
        """Everything but summary.json."""
        last = self._totals.last_index
        timeline = self._aligned_last()
        said = {} if timeline is None else {PATH: path_text(critical_path(timeline, self.job.ranks), timeline)}
        said |= {CLOCKS: clocks_text(self._clocks)} if self._clocks.several else {}
        write_text(self.folder / "report.txt", report(self.job, summary, bubbles, cause, said))
        self._board.text("report", report(self.job, summary, bubbles, cause, said, as_markdown=True), last)
        if bubbles is not None:
            self._pictures(bubbles, last)
        if self._costs is not None and (costs := self._costs.content()):
            write_json(self.folder / COSTS_NAME, costs)
        if timeline is not None:
            write_trace(self.folder / "trace.json", timeline, self.job.ranks, self._clocks.uncertainty)
        self._board.scalars(results(summary), last)
        self._board.flush()

    def _aligned_last(self) -> Timeline | None:
        """The last traced step again, now that the drift between clocks is known."""
        measure = self._measure
        if self._raw is not None and self._clocks.several:
            timeline = self._clocks.aligned(self._raw.timeline)
            timeline = timeline if measure.last is None else timeline.first(measure.last.ranks)
            measure.last_whole = timeline if measure.last_whole is measure.last else measure.last_whole
            measure.last = timeline
        return measure.last

    def _pictures(self, bubbles: Bubbles, step: int) -> None:
        measured = self._measure.last_whole or self._measure.last
        assert measured is not None
        title, path = f"measured: bubble {percent(bubbles.measured)}", critical_path(measured, self.job.ranks)
        panels = {"measured": Panel(title, measured, 1e-9, self.job.ranks, path, self._clocks.uncertainty)}
        if bubbles.simulated is not None:
            title = f"predicted: bubble {percent(bubbles.predicted)} (ideal {percent(bubbles.ideal)})"
            panels = {"predicted": Panel(title, bubbles.simulated, 1.0, self.job.ranks)} | panels
        for name, shown in {**{name: [panel] for name, panel in panels.items()}, "both": [*panels.values()]}.items():
            self._board.image(f"timeline/{name}", draw(shown, SMALL), step)
        self._write("timeline", draw([*panels.values()]))
        if bubbles.waterfall is not None:
            title = f"from perfect work to the measured step, mean over {bubbles.waterfall.steps} steps"
            fall = draw_bars(bubbles.waterfall.bars, title)
            self._board.image("waterfall", fall, step)
            self._write("waterfall", fall)

    def _write(self, name: str, picture: Picture) -> None:
        write_bytes(self.folder / f"{name}.png", picture.png)
        write_bytes(self.folder / f"{name}.svg", picture.svg)
