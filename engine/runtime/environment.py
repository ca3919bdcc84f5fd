"""What the surroundings of this process say: who started it, and how many cores it may use. Without torch."""

from __future__ import annotations

import math
import os
import resource
import tempfile

LONGEST_TEMPORARY = 60  # bytes; a Unix socket's path has 107, and multiprocessing adds about 35
SHORT_TEMPORARIES = ("/tmp", "/var/tmp", "/dev/shm")

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


def keep_sockets_short() -> None:
    """Let multiprocessing put its Unix sockets where their paths fit, should TMPDIR name a folder too deep for them.

    The folder has mode 0700 and goes with this process; child processes use it as well. ValueError where there is none.
    """
    if len(os.fsencode(tempfile.gettempdir())) <= LONGEST_TEMPORARY:
        return
    import shutil
    from multiprocessing import process, util

    for parent in SHORT_TEMPORARIES:
        try:
            folder = tempfile.mkdtemp(prefix="engine-", dir=parent)
        except OSError:
            continue
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
        return
    raise ValueError(
        f"the folder for temporary files, {tempfile.gettempdir()}, has a path too long for a Unix socket, and none of "
        f"{', '.join(SHORT_TEMPORARIES)} can be written: set TMPDIR to a folder with a path of at most "
        f"{LONGEST_TEMPORARY} bytes"
    )


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ranks_per_host(world: int) -> int:
    """How many of the run's ranks are on each host, as the launcher says; all of them where there is none."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if joined() else world
