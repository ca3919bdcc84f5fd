"""What the surroundings of this process say: who started it, and how many cores it may use. Without torch."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


def joined(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one rank of several."""
    return all(name in env for name in LAUNCHER)


def tasks_here(env: Mapping[str, str] = os.environ) -> int:
    """How many ranks a launcher has started on this host, as it says: torchrun, or Slurm; 1 where neither does."""
    if "LOCAL_WORLD_SIZE" in env:
        return int(env["LOCAL_WORLD_SIZE"])
    if env.get("SLURM_NTASKS_PER_NODE", "").isdecimal():
        return int(env["SLURM_NTASKS_PER_NODE"])
    nodes: list[int] = []  # "4(x2),3": 4 tasks on each of two nodes, 3 on one
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        nodes += [int(count)] * int(times or 1)
    number = int(env.get("SLURM_NODEID", "0"))
    return nodes[number] if number < len(nodes) else 1


class Seat(NamedTuple):
    """A rank's place on its host: its number there, how many ranks are there, and whether each sees a GPU of its own
    only."""

    local: int
    ranks: int
    alone: bool

    def enough(self, gpus: int) -> bool:
        """Whether every rank of the host finds a GPU, this one seeing so many."""
        return gpus >= (1 if self.alone else self.ranks)

    def gpu(self, gpus: int) -> int:
        """The GPU that the rank takes, of so many that it sees."""
        return 0 if self.alone else self.local % gpus


def seat_of(rank: int, world: int, env: Mapping[str, str], gpus: int) -> Seat:
    """The seat of a rank that is a process: one that a launcher started, or else one of this host's `world`."""
    if not joined(env):
        return Seat(rank, world, False)
    here = tasks_here(env)
    if "LOCAL_WORLD_SIZE" in env or "SLURM_LOCALID" not in env:
        return Seat(int(env.get("LOCAL_RANK", rank)), here, False)
    return Seat(int(env["SLURM_LOCALID"]), here, alone=gpus == 1)


def launched_world() -> int:
    """How many ranks the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def one_host() -> bool:
    """Whether all ranks of the run are on this host: always, unless a launcher says otherwise."""
    return not joined() or os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ["WORLD_SIZE"]


def open_files() -> float:
    """How many files this process may have open at once (`ulimit -n`); infinity where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def inherited_files() -> int:
    """How many files beside its three streams this process was started with; Python's own are not handed on."""
    count = 0
    folder = Path("/proc/self/fd")
    for each in [*folder.iterdir()] if folder.is_dir() else []:
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            count += int(each.name) > 2 and os.get_inheritable(int(each.name))
    return count


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ranks_per_host(world: int) -> int:
    """How many of the run's ranks are on each host, as the launcher says; all of them where there is none."""
    return tasks_here() if joined() else world
