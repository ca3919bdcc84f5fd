"""What the surroundings of this process say: who started it, and how many cores it may use. Without torch."""

from __future__ import annotations

import math
import os
import resource

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


def joined() -> bool:
    """Whether a launcher started this process as one rank of several."""
    return all(name in os.environ for name in LAUNCHER)


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


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ranks_per_host(world: int) -> int:
    """How many of the run's ranks are on each host, as the launcher says; all of them where there is none."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if joined() else world
