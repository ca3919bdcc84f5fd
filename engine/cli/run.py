"""Run one training job or one plan in the parent process, from Settings to summary.json.

    train   prepare and prove the job, write what is known, start the workers, record what they tell, sum up
    plan    build, verify, simulate, print and write the schedule, or compare several; starts nothing, imports no torch

Both return an Outcome for every end, an interruption included, and leave `summary.json` in the run folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import environment
from engine.account.records.nan_watch import LossNotFiniteError
from engine.cli.attempts import CONFIG_NAME, may_go_on, put_away
from engine.errors import CheckpointError, ExhaustedError, Interrupted, printable, said
from engine.files import UnwritableError, write_json, write_text
from engine.launch import interrupt
from engine.launch.failure_report import Outcome
from engine.plan.actions import Program
from engine.plan.choose import activations, compare, table
from engine.plan.lowering import lower
from engine.plan.schedules import SCHEDULES, build
from engine.plan.simulate import Costs, compute_only, figures, simulate
from engine.plan.steady import long_run
from engine.plan.verify import verify
from engine.plan.views.summary import CSV_NAME, plan_summary, plan_text
from engine.plan.views.text import to_csv
from engine.settings import Settings
from engine.short_summary import write_short_summary
from engine.telemetry.records import Record

if TYPE_CHECKING:
    from engine.checkpoint.store import Checkpoint
    from engine.job import Job
    from engine.report.earlier import Earlier
    from engine.report.recorder import Recorder

REFUSED = 2  # exit code: the settings are wrong, nothing was started


def train(settings: Settings, start_dir: str, run_dir: str) -> Outcome:
    """Run a training job; return how it ended. The user's relative paths are relative to `start_dir`."""
    folder, recorder = Path(run_dir).absolute(), None
    try:
        with contextlib.chdir(start_dir):  # a user's relative path means the same on every rank, also after a chdir
            passed_over: list[str] = []
            resumed = _resumed(settings, folder, start_dir, passed_over)
            job = _prepared(settings, start_dir, str(folder), resumed)
            from engine.launch.launch import launch
            from engine.report.recorder import Recorder

            recorder = Recorder(job, str(folder), earlier=_earlier(resumed, put_away(folder)))
            _describe(job, folder, recorder)
            _note_device(settings, recorder)
            _note_resumed(job.settings, resumed, passed_over, recorder)
            with _keeping(job, folder, recorder) as on_record:
                outcome = launch(job, on_record)
    except BaseException as error:  # noqa: BLE001  # an interruption too ends with a summary
        outcome = outcome_of(error)
    with interrupt.ignored():
        return finish(folder, outcome, settings, recorder)


def refuse_used(folder: Path, start_dir: Path, resume: str | None) -> Outcome | None:
    """Return the refusal of a folder that holds a run already, whose results would be lost; else None.

    A run that goes on where `resume` says may use its folder.
    """
    if not (folder / CONFIG_NAME).exists() or may_go_on(resume, start_dir, folder):
        return None
    remedy = (
        "give another folder (hydra.run.dir; with -m hydra.sweep.dir, hydra.sweep.subdir), remove it, or go on from "
        "its checkpoints with resume"
    )
    return Outcome(
        "failed", f"the folder {folder} holds a run already, which this one would overwrite: {remedy}", REFUSED
    )


def plan(settings: Settings, run_dir: str) -> Outcome:
    """Print the schedule's plan, or a comparison and keep the cheapest's; write plan.json and program.csv."""
    folder = Path(run_dir)
    try:
        compared = bool(settings.plan.compare)
        if compared:
            settings = replace(settings, schedule=_cheapest(settings, folder))
        name, pipeline = settings.schedule["name"], settings.pipeline
        program = build(name, pipeline.ranks, pipeline.microbatches, settings.schedule_options)
        text = write_plan(settings, program, folder)
        print(
            f"\nplan.json and program.csv are those of {name}; mode=plan schedule={name} draws it" if compared else text
        )
        limit, kept = settings.plan.memory_limit, activations(program)
        if limit is not None and kept > limit:
            raise ValueError(f"{name} keeps {kept:g} activations, more than plan.memory_limit={limit:g}")
        outcome = Outcome("completed")
    except ValueError as error:
        outcome = outcome_of(SettingsError(str(error)))
    except KeyboardInterrupt as error:
        outcome = outcome_of(error)
    return finish(folder, outcome, settings)


def _cheapest(settings: Settings, folder: Path) -> dict[str, Any]:
    """Print and write the comparison that plan.compare asks for; return the `schedule` section of its first row."""
    pipeline, wanted = settings.pipeline, settings.plan
    options = {settings.schedule["name"]: settings.schedule_options}
    choices = compare(wanted.compare, pipeline.ranks, pipeline.microbatches, wanted.costs, wanted.memory_limit, options)
    text = table(choices)
    print(text)
    write_text(folder / "comparison.txt", text + "\n")
    write_json(folder / "comparison.json", [asdict(choice) for choice in choices])
    if choices[0].refused:
        raise ValueError(
            f"none of plan.compare is possible for pipeline.ranks={pipeline.ranks} pipeline.microbatches="
            f"{pipeline.microbatches} and plan.memory_limit={wanted.memory_limit}: the table says why"
        )
    return {"name": choices[0].name, **options.get(choices[0].name, {})}


class SettingsError(ValueError):
    """Settings that cannot be run; nothing was started."""


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a run that an exception in the parent ended."""
    if isinstance(error, KeyboardInterrupt):
        code = error.exit_code if isinstance(error, Interrupted) else 130
        return Outcome("interrupted", str(error) or "interrupted", code)
    if isinstance(error, SettingsError):
        return Outcome("failed", printable(str(error)), REFUSED)
    if isinstance(error, UnwritableError | LossNotFiniteError | ExhaustedError | CheckpointError):
        return Outcome("failed", str(error), 1)
    return Outcome("failed", said(error), 1, printable("".join(traceback.format_exception(error))))


def finish(folder: Path, outcome: Outcome, settings: Settings | None, recorder: Recorder | None = None) -> Outcome:
    """Write how the run ended: error.txt where it failed, summary.json always.

    Where the folder takes no more, that is part of how it ended: a run whose results are lost has failed.
    """
    try:
        try:
            if outcome.status == "failed":
                text = f"{outcome.error}\n\n{outcome.traceback or ''}"
                write_text(folder / "error.txt", text.rstrip() + "\n")
        finally:
            if recorder is not None:
                recorder.finish(outcome.status, outcome.error)
            else:
                write_short_summary(folder, outcome.status, outcome.error, settings)
    except UnwritableError as error:
        if outcome.status == "completed":
            return outcome_of(error)
        said_already = str(error.path.parent) in (outcome.error or "")
        return outcome if said_already else replace(outcome, error=f"{outcome.error}; {error}")
    return outcome


def write_plan(
    settings: Settings, program: Program, folder: Path, layers: Sequence[Sequence[str]] | None = None
) -> str:
    """Verify and simulate a program, write plan.json and program.csv; return the text for a terminal."""
    reduce = settings.data_parallel.replicas * program.placement.copies > 1
    lowered = lower(program, reduce, step=True, gather=reduce and settings.divided)
    for each in (program, lowered):
        verify(each, ascending=SCHEDULES[program.name].ascending)
    computations, pipeline = compute_only(program), settings.pipeline
    costs = Costs.from_settings(settings.plan.costs, program.placement, program.microbatches)
    timeline = simulate(computations, costs)
    found = figures(computations, timeline)
    long = None
    if program.asynchronous:
        options = settings.schedule_options
        long = long_run(program.name, pipeline.ranks, pipeline.microbatches, settings.plan.costs, options)
    write_json(folder / "plan.json", plan_summary(computations, lowered, costs, timeline, found, layers, long))
    write_text(folder / CSV_NAME, to_csv(computations))
    return plan_text(computations, lowered, timeline, found, long=long)


def _resumed(settings: Settings, folder: Path, start_dir: str, passed_over: list[str]) -> Checkpoint | None:
    """Return the checkpoint to go on from; why newer ones are not whole is added to `passed_over`."""
    if settings.resume is None:
        return None
    from engine.checkpoint.resume import find

    try:
        return find(settings, folder, start_dir, passed_over.append)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _earlier(resumed: Checkpoint | None, attempt: Path | None) -> Earlier | None:
    """Return what a resumed run takes over from the attempts before it, the last of which lies in `attempt`."""
    if resumed is None:
        return None
    from engine.report.earlier import Earlier

    manifest = resumed.manifest
    return Earlier.of(manifest.step, manifest.samples, manifest.progress, attempt)


@contextlib.contextmanager
def _keeping(job: Job, folder: Path, recorder: Recorder) -> Iterator[Callable[[Record], None]]:
    """Give what takes in records: the recorder, and where checkpoints are made, whoever makes them visible."""
    if not job.settings.checkpoint.wanted:
        yield recorder
        return
    from engine.checkpoint.keeper import Keeper

    versions = {"engine": version("hydra-pipeline-engine"), "torch": version("torch")}
    keeper = Keeper(job, folder, versions, recorder.progress, lambda level, text: _note(recorder, level, text))
    keeper.begin()

    def on_record(record: Record) -> None:
        recorder(record)
        keeper(record)

    try:
        yield on_record
    finally:
        keeper.close()


def _note_resumed(settings: Settings, resumed: Checkpoint | None, passed_over: list[str], recorder: Recorder) -> None:
    """Say where the run goes on, which checkpoints it did not take, and what is different from before."""
    for line in passed_over:
        _note(recorder, logging.WARNING, f"passed over: {line}")
    if resumed is None:
        return
    from engine.checkpoint.resume import differences

    _note(recorder, logging.INFO, f"going on after {resumed.manifest.step} steps, from {resumed.folder}")
    for line in differences(resumed.manifest, settings):
        _note(recorder, logging.WARNING, f"not as before: {line}")


def _prepared(settings: Settings, start_dir: str, run_dir: str, resumed: Checkpoint | None) -> Job:
    """Return the Job; everything that can be refused is refused here, as SettingsError."""
    if settings.launch == "processes" and not environment.joined():
        from engine.launch.supervise import warm_up

        warm_up()
    from engine.launch import handover
    from engine.prepare.prepare import prepare

    try:
        _check_launcher(settings)
        handover.check(settings)
        return prepare(settings, start_dir, run_dir, resumed)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _check_launcher(settings: Settings) -> None:
    """Raise ValueError where a launcher started another number of ranks than the configuration asks for."""
    if not environment.joined():
        return
    started = environment.launched_world()
    if settings.launch != "processes":
        raise ValueError(f"launch={settings.launch} has all ranks in one process, but the launcher started {started}")
    if settings.world != started:
        raise ValueError(
            f"pipeline.ranks={settings.pipeline.ranks} x data_parallel.replicas={settings.data_parallel.replicas} are "
            f"{settings.world} ranks, but the launcher started {started} (nnodes x nproc-per-node): make them equal"
        )


def _describe(job: Job, folder: Path, recorder: Recorder) -> None:
    """Write what is known before the start: the resolved configuration and the plan."""
    ends = [*job.split[1:], len(job.layers)]
    layers = [[layer.name for layer in job.layers[a:b]] for a, b in zip(job.split, ends, strict=True)]
    write_plan(job.settings, job.compute, folder, layers)
    config = asdict(job.settings)
    write_json(folder / CONFIG_NAME, config)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
    _note(recorder, logging.INFO, f"configuration {digest} ({CONFIG_NAME}), seed {job.settings.seed}")
    batch = job.settings.train.global_batch_size
    if batch > job.train_samples:
        said = f"train.global_batch_size={batch} is more than the {job.train_samples} samples there are"
        _note(recorder, logging.WARNING, f"{said}: every step takes all of them, and is an epoch")


def _note_device(settings: Settings, recorder: Recorder) -> None:
    """Log a warning where `device=auto` has left GPUs unused."""
    import torch

    from engine.prepare.devices import passed_over

    if line := passed_over(settings, os.environ, torch.cuda.device_count()):
        _note(recorder, logging.WARNING, line)


def _note(recorder: Recorder, level: int, message: str) -> None:
    recorder(Record("log", {"rank": None, "level": level, "logger": __name__, "message": message}, {}))
