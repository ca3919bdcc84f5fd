"""scripts/bench startup [--repeats N] [--json FILE]

How long the engine takes to come and to go: from typing the command to the end of the first step, and from the last
word on the screen to the end of the process, seen from outside. `plan` has no step: its first is its last word.

A learning rate of ours marks the first step: the scheduler asks for it after each step of a worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.options import parser
from engine.tables import table

WANTED_FIRST_S, WANTED_GONE_S = 5.0, 0.5  # on a quiet machine with two cores
MARKS = "ENGINE_BENCH_MARKS"  # the file that the steps are marked in
ROWS = {
    "mlp": ("model=mlp", "train.steps=3", "lr_scheduler._target_=benchmarks.startup.marking"),
    "plan": ("mode=plan", "schedule=1f1b", "pipeline.ranks=4", "pipeline.microbatches=8"),
}


def marking(optimizer: Optimizer) -> LambdaLR:
    """A scheduler that leaves the learning rate as it is, and writes down when the first step was done."""

    def factor(step: int) -> float:
        if step == 1:
            with Path(os.environ[MARKS]).open("a") as file:
                file.write(f"{os.getpid()} {time.monotonic_ns()}\n")
        return 1.0

    return LambdaLR(optimizer, factor)


def run(arguments: Sequence[str]) -> dict[str, float]:
    """Seconds of one run: to its first step, to its last word, and from there to its end."""
    with tempfile.TemporaryDirectory() as name:
        marks = Path(name, "marks")
        command = [sys.executable, "-m", "engine", *arguments, f"hydra.run.dir={Path(name, 'run')}"]
        began = last = time.monotonic_ns()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, env={**os.environ, MARKS: str(marks)}
        )
        assert process.stdout is not None
        said = b""
        while piece := process.stdout.read(65536):
            said, last = said + piece, time.monotonic_ns()
        code = process.wait()
        ended = time.monotonic_ns()
        if code:
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{said.decode(errors='replace')}")
        lines = [line.split() for line in marks.read_text().splitlines()] if marks.exists() else []
        # The parent tries the scheduler before it starts anything.
        steps = [int(at) for pid, at in lines if int(pid) != process.pid]
        first = min(steps, default=last)
    return {"first": (first - began) / 1e9, "last": (last - began) / 1e9, "gone": (ended - last) / 1e9}


def main(arguments: Sequence[str]) -> None:
    given = parser("startup", __doc__).parse_args(arguments)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    for _ in range(given.repeats):
        for name, row in ROWS.items():
            measured[name].append(run(row))
    lines = []
    for name, runs in measured.items():
        ranges = {key: sorted(each[key] for each in runs) for key in runs[0]}
        right = median(ranges["first"]) < WANTED_FIRST_S and median(ranges["gone"]) < WANTED_GONE_S
        cells = [f"{median(of):.2f} ({of[0]:.2f} to {of[-1]:.2f})" for of in ranges.values()]
        lines.append([name, *cells, "right" if right else "slow"])
    print(table([["command", "first step, s", "last word, s", "gone after it, s", "verdict"], *lines]))
    print(f"wanted on a quiet machine: first step within {WANTED_FIRST_S:g} s, gone within {WANTED_GONE_S:g} s")
    for name, row in ROWS.items():
        print(f"{name}: python -m engine {' '.join(row)}")
    if given.json:
        written: dict[str, Any] = {"repeats": given.repeats, "rows": measured}
        given.json.write_text(json.dumps(written, indent=1) + "\n")
