"""The recorder: takes in what workers tell and leaves the run folder complete, however the run ends.

    step ─────► all ranks' records of a step ──► account, totals ──► event file, progress bar
    evaluation ► all replicas' ────────────────► event file, a line
    log, error, ready ─────────────────────────► engine.log; warnings also on the console
    finish ───► summary.json, report.txt, trace.json, timeline.png, TensorBoard's text, images and HParams session

Only sums and the last traced step are kept, so memory does not grow with the number of spans.
"""

from __future__ import annotations

import logging
import sys
from io import BytesIO
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from engine.job import Job
from engine.records import Record
from engine.report.board import Board, HParam
from engine.report.bubble import NAMES, Account
from engine.report.cause import diagnose
from engine.report.draw import Panel, draw
from engine.report.files import write_bytes, write_json, write_text
from engine.report.gather import Evaluations, Step, Steps
from engine.report.log import RunLog, line_of, tag
from engine.report.measure import Bubbles, Measure, fractions
from engine.report.perfetto import write_trace
from engine.report.progress import Progress
from engine.report.summary import Totals
from engine.report.tables import percent
from engine.report.text import closing, report

METRICS = (
    "train/loss", "throughput/samples_per_second", "bubble/ideal", "bubble/predicted", "bubble/measured",
)  # fmt: skip


class Recorder:
    """Call it with every record, then `finish` once. `console` is sys.stdout unless given.

    `console_level`: log lines of this level (logging's numbers) and above are shown on the console too.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path | str,
        *,
        progress: bool = True,
        console: TextIO | None = None,
        console_level: int = logging.WARNING,
    ) -> None:
        self.job, self.folder = job, Path(run_dir)
        self._console_level = console_level
        self._log = RunLog(self.folder)
        self._board = Board(self.folder)
        self._progress = Progress(job, console or sys.stdout, progress)
        self._steps, self._evaluations = Steps(job), Evaluations(job)
        self._totals, self._measure = Totals(job), Measure(job)
        self._traced: list[int] = []  # the first and the last traced step
        self._summary: dict[str, Any] | None = None

    def __call__(self, record: Record) -> None:
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
        elif line := line_of(record):
            level, rank, logger, message = line
            self._log.write(level, rank, logger, message)
            if record.kind == "log" and level >= self._console_level:
                self._progress.say(f"{logging.getLevelName(level)} {tag(rank)} {message}")

    def finish(self, status: str, error: str | None = None) -> dict[str, Any]:
        """Write everything, print the report, close all files; returns the content of summary.json.

        `status`: completed, failed or interrupted. A second call changes nothing and returns the same.
        """
        if self._summary is None:
            self._progress.close()
            bubbles = self._measure.result()
            self._summary = self._totals.summary(status, error, bubbles)
            try:
                write_json(self.folder / "summary.json", self._summary)
                if self._totals.steps:
                    self._leave(self._summary, bubbles)
            finally:
                self._board.close()
                self._log.close()
        return self._summary

    # -- while it runs ---------------------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        if self._totals.steps == 0:
            self._board.begin_session(_hparams(self.job, step), METRICS)
        self._totals.add(step)
        values: dict[str, float | None] = {
            "train/loss": step.loss,
            "train/lr": step.lr,
            "train/grad_norm": step.grad_norm,
            "throughput/samples_per_second": step.samples_per_second,
        }
        for rank, (peak, peak_bytes) in enumerate(zip(step.peak_in_flight, step.peak_activation_bytes, strict=True)):
            values[f"memory/rank{rank}/peak_in_flight"] = peak
            values[f"memory/rank{rank}/peak_activation_bytes"] = peak_bytes
        if step.timeline is not None:
            values |= _shares(self.job, self._measure.add(step.timeline))
            self._traced = [*self._traced[:1], step.index]
        self._board.scalars(values, step.index)
        if self._progress.step(step):
            self._board.flush()

    # -- at the end ------------------------------------------------------------------------------------------------

    def _leave(self, summary: dict[str, Any], bubbles: Bubbles | None) -> None:
        """Everything but summary.json."""
        last, cause = self._totals.last_index, diagnose(self.job, bubbles)
        write_text(self.folder / "report.txt", report(self.job, summary, bubbles, cause))
        self._board.text("report", report(self.job, summary, bubbles, cause, as_markdown=True), last)
        if bubbles is not None:
            for index in self._traced:  # constants of the run, from its first traced step to its last
                self._board.scalars({"bubble/ideal": bubbles.ideal, "bubble/predicted": bubbles.predicted}, index)
            self._pictures(bubbles, last)
        if self._measure.last is not None:
            write_trace(self.folder / "trace.json", self._measure.last, self.job.ranks)
        if summary["status"] == "completed":
            self._board.end_session()
        self._board.flush()
        self._progress.say("\n" + closing(self.job, summary, bubbles, cause, self.folder))

    def _pictures(self, bubbles: Bubbles, step: int) -> None:
        measured = self._measure.last_whole or self._measure.last
        assert measured is not None
        panels = {"measured": Panel(f"measured: bubble {percent(bubbles.measured)}", measured, 1e-9, self.job.ranks)}
        if bubbles.simulated is not None:
            title = f"predicted: bubble {percent(bubbles.predicted)} (ideal {percent(bubbles.ideal)})"
            panels = {"predicted": Panel(title, bubbles.simulated, 1.0, self.job.ranks)} | panels
        for name, panel in panels.items():
            self._board.image(f"timeline/{name}", draw([panel]), step)
        write_bytes(self.folder / "timeline.png", _png(draw(list(panels.values()))))


def _png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format="png")
    return buffer.getvalue()


def _shares(job: Job, account: Account) -> dict[str, float]:
    """bubble/measured, and each name's share of a rank's window: the mean over replicas."""
    shares = fractions(account.table)
    by_rank = shares.reshape(job.replicas, job.ranks, len(NAMES)).mean(axis=0)
    values = {"bubble/measured": 1 - float(shares[:, NAMES.index("compute")].mean())}
    for rank, row in enumerate(by_rank.tolist()):
        values |= {
            f"bubble/rank{rank}/{name}": share for name, share in zip(NAMES, row, strict=True) if name != "compute"
        }
    return values


def _hparams(job: Job, first: Step) -> dict[str, HParam]:
    """The same keys with the same types for every run, whatever it has set: see `Board.begin_session`."""
    settings = job.settings
    return {
        "schedule": job.compute.name,
        "ranks": job.ranks,
        "stages": job.placement.stages,
        "microbatches": settings.pipeline.microbatches,
        "replicas": job.replicas,
        "model": _target(settings.model),
        "data": _target(settings.data),
        "optimizer": _target(settings.optimizer),
        "lr": first.lr or 0.0,
        "lr_scheduler": _target(settings.lr_scheduler or {}),
        "allreduce": settings.allreduce.name,
        "partition": str(settings.partition.get("name", "model")),
        "global_batch_size": settings.train.global_batch_size,
        "accumulate": settings.train.accumulate,
        "clip_norm": str(settings.train.clip_norm),
        "precision": settings.precision,
        "device": settings.device,
        "launch": settings.launch,
        "seed": str(settings.seed),
    }


def _target(group: dict[str, Any]) -> str:
    return str(group.get("_target_", "none"))
