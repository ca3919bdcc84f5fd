"""Running one side of a case once, in processes of its own, and reading what it measured."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.cases import Case
from benchmarks.figures import Durations, Run, Step, step_time
from engine.plan.actions import COMPUTE, Program
from engine.plan.schedules import build
from engine.plan.simulate import compute_only
from engine.plan.timeline import Kind, Timeline
from engine.plan.views.text import from_csv, to_csv
from engine.report.tensorboard.series import PLUGIN, tag_of, unpacked
from engine.tab.document import measured

LIMIT_S = 300.0
MOST_STEPS = 1000  # of a run
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def ours_command(case: Case, program: str | None = None) -> list[str]:
    """The command of our side, without the run folder. `program`: the file of a borrowed program."""
    return [sys.executable, "-m", "engine", *case.overrides(program)]


def peer_commands(case: Case, folder: str) -> list[list[str]]:
    """The peer's commands, one per rank."""
    return [[sys.executable, "-m", "benchmarks.peer", case.name, str(rank), folder] for rank in range(case.ranks)]


def plain_command(case: Case, threads: int, file: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.plain", case.name, str(threads), file]


def run_together(commands: Sequence[Sequence[str]], folder: Path, env: dict[str, str]) -> None:
    """Run the commands side by side; the first failure ends all of them and is raised with what was printed."""
    logs = [(folder / f"output{i}").open("w+") for i in range(len(commands))]
    processes = [
        subprocess.Popen(command, env={**os.environ, **env}, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        for command, log in zip(commands, logs, strict=True)
    ]
    try:
        for process, log, command in zip(processes, logs, commands, strict=True):
            if process.wait(LIMIT_S):
                log.seek(0)
                raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}:\n{log.read()[-4000:]}")
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()


def run_ours(case: Case, borrowed: Program | None = None) -> Run:
    """`borrowed`: the peer's program, where the case is to run that."""
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), None
        if borrowed is not None:
            file = str(folder / "borrowed.csv")
            Path(file).write_text(to_csv(borrowed))
        run_together([[*ours_command(case, file), f"hydra.run.dir={folder / 'run'}"]], folder, LOOPBACK)
        summary = json.loads((folder / "run" / "summary.json").read_text())
        program = from_csv((folder / "run" / "program.csv").read_text(), name=case.name)
        details = {
            "loss": summary["loss"],
            "bubble": {key: summary["bubble"][key] for key in ("predicted", "measured")},
        }
        steps = [of_timeline(each, program) for step, each in documented(folder / "run") if step >= case.warmup]
        return Run(summary["step_time"]["median"], program, steps, details)


def run_peer(case: Case) -> Run:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_together(peer_commands(case, name), folder, LOOPBACK)
        ranks = [json.loads((folder / f"peer{rank}.json").read_text()) for rank in range(case.ranks)]
        times = {tuple(key.split()): seconds for rank in ranks for key, seconds in rank["durations"].items()}
        file = folder / "program.csv"  # written by the peer's schedules of several stages per rank
        program = (
            compute_only(from_csv(file.read_text(), name=case.name))
            if file.exists()
            else build(case.schedule, case.ranks, case.microbatches)
        )
        ends = ranks[0]["ends"]
        steps = [
            Step(ends[i] - ends[i - 1], of_calls(times, program, i, len(ends))) for i in range(case.warmup, len(ends))
        ]
        losses = [rank["loss"] for rank in ranks if rank["loss"] is not None]
        return Run(step_time(ends, case.warmup), program, steps, {"loss": losses})


def run_plain(case: Case, threads: int) -> Run:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "plain.json")
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        run_together([plain_command(case, threads, str(file))], Path(name), env)
        result = json.loads(file.read_text())
        return Run(step_time(result["ends"], case.warmup), details={"threads": result["threads"]})


def documented(folder: Path) -> list[tuple[int, Timeline]]:
    """The steps of a finished run whose timelines are in its event file: numbers and timelines."""
    log = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    tags = {tag_of(step): step for step in range(MOST_STEPS)}
    found = []
    for tag in log.PluginTagToContent(PLUGIN):
        (event,) = log.Tensors(tag)
        found.append((tags[tag], measured(unpacked(event.tensor_proto.string_val[0])).timeline))
    return sorted(found, key=lambda each: each[0])


def of_timeline(timeline: Timeline, program: Program) -> Step:
    """A measured step; its time is the period of rank 0, which is what is measured of the peer."""
    durations = {op.name: np.zeros((program.stages, program.microbatches)) for op in COMPUTE}
    computes = np.flatnonzero(np.isin(timeline.kind, COMPUTE))
    for i in computes:
        name = Kind(int(timeline.kind[i])).name
        durations[name][timeline.stage[i], timeline.microbatch[i]] = (timeline.end[i] - timeline.start[i]) * 1e-9
    start, end = timeline.windows[0].tolist()
    return Step((end - start) * 1e-9, {name: each.tolist() for name, each in durations.items()})


def of_calls(times: Mapping[tuple[str, ...], Sequence[float]], program: Program, step: int, steps: int) -> Durations:
    """The durations of one of the `steps` of a run in which each stage's actions were timed in the order of its row.

    `times`: (op, stage) -> seconds of all calls. A kind of action that a stage does as part of another has none.
    """
    durations = {op.name: np.zeros((program.stages, program.microbatches)) for op in COMPUTE}
    seen: Counter[tuple[str, int]] = Counter()
    for rank in range(program.ranks):
        for action in program.actions(rank):
            key = (action.op.name, action.stage)
            calls = times.get((action.op.name, str(action.stage)), ())
            if not calls:
                continue
            each, rest = divmod(len(calls), steps)
            if rest:
                raise RuntimeError(f"stage {action.stage} did {len(calls)} {action.op.name} in {steps} steps")
            durations[action.op.name][action.stage, action.microbatch] = calls[step * each + seen[key]]
            seen[key] += 1
    return {name: each.tolist() for name, each in durations.items()}
