"""One case measured: its sides in turn, and what was measured as JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.figures import Run, compare
from benchmarks.sides import ours_command, peer_commands, plain_command, run_ours, run_peer, run_plain


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Run the case's sides in turn, `repeats` times, and compare them."""
    ours: list[Run] = []
    peer: list[Run] = []
    plain: dict[str, list[float]] = {"1 thread": [], "all threads": []} if case.plain else {}
    for repeat in range(repeats):
        print(f"{case.name}: run {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        if case.theirs:
            peer.append(run_peer(case))
        ours.append(run_ours(case, peer[-1].program if case.borrowed else None))
        for label, times in plain.items():
            times.append(run_plain(case, threads=1 if label == "1 thread" else 0).step_s)
    sizes = {"schedule": case.schedule, "ranks": case.ranks, "microbatches": case.microbatches}
    return {**sizes, **compare(ours, peer, plain), "commands": commands(case)}


def commands(case: Case) -> dict[str, str]:
    """What was run, to be pasted into a shell (of the peer, rank 0: it wants the others beside it)."""
    shown = {"ours": ours_command(case, "FOLDER/program.csv" if case.borrowed else None)}
    if case.theirs:
        shown["peer"] = peer_commands(case, "FOLDER")[0]
    if case.plain:
        shown["plain"] = plain_command(case, 1, "FILE")
    return {side: shlex.join(["python", *command[1:]]) for side, command in shown.items()}


def written(repeats: int, rows: Mapping[str, Any], **more: Any) -> str:
    """Everything that was measured, with the machine, as JSON."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    return json.dumps({"machine": machine, "repeats": repeats, **more, "rows": rows}, indent=1)
