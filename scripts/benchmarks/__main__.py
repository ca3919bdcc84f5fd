"""scripts/bench [sleep] [tiny] [resnet50] [gpt] [--repeats N] [--json FILE]
scripts/bench allreduce | drawbacks [--help]

Runs the engine, torch.distributed.pipelining and one plain process in turn, N times over, so that a change of the
machine's mood meets all of them. A step's time is, on every side, the median period between consecutive step ends of
the first rank (the whole process) after a warm-up, without barriers. One thread per worker, SGD. The peer's messages
travel by gloo on loopback; ours as the engine chooses by itself, and in the rows so named by gloo too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import GROUPS, Case
from benchmarks.figures import Run, compare, table
from benchmarks.sides import ours_command, peer_commands, plain_command, run_ours, run_peer, run_plain

COMMANDS = {name: f"benchmarks.{name}" for name in ("allreduce", "drawbacks")}  # each with a `main(arguments)`


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Run the case's sides in turn, `repeats` times, and compare them."""
    ours: list[Run] = []
    peer: list[Run] = []
    plain: dict[str, list[float]] = {"1 thread": [], "all threads": []} if case.plain else {}
    for repeat in range(repeats):
        print(f"{case.name}: run {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        ours.append(run_ours(case))
        peer.append(run_peer(case))
        for label, times in plain.items():
            times.append(run_plain(case, threads=1 if label == "1 thread" else 0).step_s)
    result = compare(case.schedule, case.ranks, case.microbatches, ours, peer, plain)
    return {**result, "commands": commands(case)}


def commands(case: Case) -> dict[str, str]:
    """What was run, to be pasted into a shell (of the peer, rank 0: it wants the others beside it)."""
    shown = {"ours": ours_command(case), "peer": peer_commands(case, "FOLDER")[0]}
    if case.plain:
        shown["plain"] = plain_command(case, 1, "FILE")
    return {side: shlex.join(["python", *command[1:]]) for side, command in shown.items()}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("groups", nargs="*", metavar="row", help=f"{', '.join(GROUPS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--json", type=Path, help="also write everything that was measured to this file")
    given = parser.parse_args(arguments)
    if unknown := [group for group in given.groups if group not in GROUPS]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats}: at least 1")

    wanted = [case for group in given.groups or GROUPS for case in GROUPS[group]]
    results = {case.name: measure(case, given.repeats) for case in wanted}
    print(table(results))
    for name, result in results.items():
        for side, command in result["commands"].items():
            print(f"{name}, {side}: {command}")
    if given.json:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        given.json.write_text(json.dumps({"machine": machine, "repeats": given.repeats, "rows": results}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:])
    else:
        main(sys.argv[1:])
