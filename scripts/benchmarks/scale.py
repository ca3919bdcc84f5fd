"""scripts/bench scale [NAME:RANKS:MICROBATCHES ...] [--json FILE]

Seconds and bytes to generate, prove and simulate programs of millions of actions: by default 1F1B with 1024 ranks and
4096 micro-batches (8.4 million actions), every other schedule with 256 and 1024. A process for each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import SYNCHRONOUS
from benchmarks.figures import aligned
from engine.plan.schedules import build
from engine.plan.simulate import Costs, figures, simulate
from engine.plan.verify import verify

DEFAULT = ["1f1b:1024:4096", *(f"{name}:256:1024" for name in SYNCHRONOUS if name != "1f1b")]
LIMIT_S = 600.0


def measured(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """Everything once, in this process."""
    at = [time.perf_counter()]
    program = build(name, ranks, microbatches)
    at.append(time.perf_counter())
    verify(program)
    at.append(time.perf_counter())
    found = figures(program, simulate(program, Costs.from_settings({}, program.placement, microbatches)))
    at.append(time.perf_counter())
    steps = dict(zip(("generate_s", "verify_s", "simulate_s"), (b - a for a, b in itertools.pairwise(at)), strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"actions": len(program), **steps, "total_s": at[-1] - at[0], "peak_bytes": peak, "rate": found.bubble_rate}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench scale", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("programs", nargs="*", default=DEFAULT, metavar="NAME:RANKS:MICROBATCHES")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    parser.add_argument("--here", action="store_true", help="a single program, in this process, printed as JSON")
    given = parser.parse_args(arguments)
    if given.here:
        name, ranks, microbatches = given.programs[0].split(":")
        print(json.dumps(measured(name, int(ranks), int(microbatches))))
        return
    rows = {}
    for program in given.programs:
        command = [sys.executable, "-m", "benchmarks", "scale", program, "--here"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
        rows[program] = json.loads(done.stdout)
    print(
        aligned(
            [
                ["program", "actions", "generate s", "verify s", "simulate s", "total s", "GB", "bubble rate"],
                *(line(*row) for row in rows.items()),
            ]
        )
    )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


def line(program: str, row: dict[str, Any]) -> list[str]:
    seconds = [f"{row[key]:.1f}" for key in ("generate_s", "verify_s", "simulate_s", "total_s")]
    return [program, str(row["actions"]), *seconds, f"{row['peak_bytes'] / 1e9:.2f}", f"{row['rate']:.4f}"]
