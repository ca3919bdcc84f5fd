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

LIMIT_S = 300.0
ACTION = re.compile(r"(?P<stage>\d+)(?P<op>[FB])\d+")
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def ours_command(case: Case) -> list[str]:
    """The command of our side, without the run folder."""
    return [sys.executable, "-m", "engine", *case.overrides]


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


def run_ours(case: Case) -> Run:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_together([[*ours_command(case), f"hydra.run.dir={folder / 'run'}"]], folder, LOOPBACK)
        summary = json.loads((folder / "run" / "summary.json").read_text())
        trace = json.loads((folder / "run" / "trace.json").read_text())
        return Run(summary["step_time"]["median"], trace_durations(trace, case.ranks), {"loss": summary["loss"]})


def run_peer(case: Case) -> Run:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_together(peer_commands(case, name), folder, LOOPBACK)
        ranks = [json.loads((folder / f"peer{rank}.json").read_text()) for rank in range(case.ranks)]
        durations = {op: [median(rank["durations"][op]) for rank in ranks] for op in ("F", "B")}
        return Run(step_time(ranks[0]["ends"], case.warmup), durations, {"loss": ranks[-1]["loss"]})


def run_plain(case: Case, threads: int) -> Run:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "plain.json")
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        run_together([plain_command(case, threads, str(file))], Path(name), env)
        result = json.loads(file.read_text())
        return Run(step_time(result["ends"], case.warmup), details={"threads": result["threads"]})


def trace_durations(trace: dict[str, Any], stages: int) -> dict[str, list[float]]:
    """Op ("F", "B") -> median seconds of its spans, per stage, in a run's trace.json (which counts microseconds)."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in trace["traceEvents"]:
        name = ACTION.fullmatch(event.get("name", ""))
        if name and event["ph"] == "X":
            found[name["op"], int(name["stage"])].append(event["dur"] * 1e-6)
    return {op: [median(found[op, stage]) for stage in range(stages)] for op in ("F", "B")}
