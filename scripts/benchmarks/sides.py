"""Running one side of a case once, in processes of its own, and reading what it measured."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import Case
from benchmarks.figures import Run, step_time
from engine.plan.actions import COMPUTE, Program
from engine.plan.schedules import build
from engine.plan.simulate import compute_only
from engine.plan.text import from_csv, to_csv

Spans = dict[tuple[str, ...], list[float]]  # (op, stage) -> seconds
LIMIT_S = 300.0
ACTION = re.compile(r"(?P<stage>\d+)(?P<op>[FBIW])\d+")
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
        trace = json.loads((folder / "run" / "trace.json").read_text())
        program = from_csv((folder / "run" / "program.csv").read_text(), name=case.name)
        details = {
            "loss": summary["loss"],
            "bubble": {key: summary["bubble"][key] for key in ("predicted", "measured")},
        }
        return Run(summary["step_time"]["median"], program, trace_durations(trace, program.stages), details)


def run_peer(case: Case) -> Run:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_together(peer_commands(case, name), folder, LOOPBACK)
        ranks = [json.loads((folder / f"peer{rank}.json").read_text()) for rank in range(case.ranks)]
        spans: Spans = {tuple(key.split()): times for rank in ranks for key, times in rank["durations"].items()}
        file = folder / "program.csv"  # written by the peer's schedules of several stages per rank
        program = (
            compute_only(from_csv(file.read_text(), name=case.name))
            if file.exists()
            else build(case.schedule, case.ranks, case.microbatches)
        )
        losses = [rank["loss"] for rank in ranks if rank["loss"] is not None]
        return Run(step_time(ranks[0]["ends"], case.warmup), program, medians(spans, program.stages), {"loss": losses})


def run_plain(case: Case, threads: int) -> Run:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "plain.json")
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        run_together([plain_command(case, threads, str(file))], Path(name), env)
        result = json.loads(file.read_text())
        return Run(step_time(result["ends"], case.warmup), details={"threads": result["threads"]})


def trace_durations(trace: dict[str, Any], stages: int) -> dict[str, list[float]]:
    """Op -> median seconds of its spans, per stage, in a run's trace.json (which counts microseconds)."""
    found: Spans = defaultdict(list)
    for event in trace["traceEvents"]:
        name = ACTION.fullmatch(event.get("name", ""))
        if name and event["ph"] == "X" and event["cat"] == "compute":  # the critical path repeats some of them
            found[name["op"], name["stage"]].append(event["dur"] * 1e-6)
    return medians(found, stages)


def medians(spans: Spans, stages: int) -> dict[str, list[float]]:
    """(Op, stage) -> seconds, as op -> median per stage; 0 where a stage has no such action."""
    return {
        op.name: [median(spans.get((op.name, str(stage)), [0.0])) for stage in range(stages)]
        for op in COMPUTE
        if any((op.name, str(stage)) in spans for stage in range(stages))
    }
