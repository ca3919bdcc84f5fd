"""The environment of this process: its launcher, cores, open files and temporary folders. Imports no torch."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

LONGEST_TEMPORARY = 60  # bytes; a Unix socket's path has 107, and multiprocessing adds about 35
SHORT_TEMPORARIES = ("/tmp", "/var/tmp", "/dev/shm")
IN_MEMORY = "/dev/shm"  # every host has a file system of its own there, which can lock files
LEAST_ROOM = 2**20  # bytes; what ranks write to find each other is some kilobytes

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


def joined(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher such as torchrun started this process as one rank of several."""
    return all(env.get(name) for name in LAUNCHER)


def check_launcher() -> None:
    """Raise ValueError where a launcher's environment variables are incomplete or out of range."""
    given = [name for name in LAUNCHER if os.environ.get(name)]
    missing = [name for name in LAUNCHER if name not in given]
    if missing and {"RANK", "WORLD_SIZE"} & {*given}:  # the address alone is in many an environment
        raise ValueError(
            f"{_shown(*given)} in the environment, as a launcher sets it, without {', '.join(missing)}: set all, or "
            f"start through torchrun; unset {', '.join(given)} where the engine is to start its own ranks"
        )
    if missing:
        return
    world, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if rank >= world:
        raise ValueError(f"RANK={rank} does not exist where WORLD_SIZE={world}: ranks are 0..{world - 1}")
    _number("MASTER_PORT", 1, 2**16 - 1)
    try:
        os.environ["MASTER_ADDR"].encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{_shown('MASTER_ADDR')} is no name of a host ({error}): give rank 0's") from error
    for name, least, most in (("LOCAL_RANK", 0, world - 1), ("LOCAL_WORLD_SIZE", 1, world), (_ATTEMPT, 0, None)):
        if os.environ.get(name):
            _number(name, least, most)
    for name in ("SLURM_NODEID", "SLURM_LOCALID"):
        if os.environ.get(name):
            _number(name, 0)


def _number(name: str, least: int, most: int | None = None) -> int:
    text = os.environ[name]
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if value < least or (most is not None and value > most):
        limits = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ValueError(f"{_shown(name)} is not a whole number {limits}, as a launcher would set it")
    return value


def _shown(*names: str) -> str:
    return ", ".join(f"{name}={' '.join(os.environ[name].split())[:80]}" for name in names)


def attempt() -> int:
    """Return how often the launcher has restarted this host's ranks (torchrun --max-restarts)."""
    return int(os.environ.get(_ATTEMPT) or "0")


def run_id() -> str:
    """Return the launcher's name of the run; empty where it has none."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def tasks_here(env: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks torchrun or Slurm started on this host; 1 where neither says."""
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
    """A rank's place on its host: its number there, the ranks there, and whether each sees its own GPU only."""

    local: int
    ranks: int
    alone: bool

    def enough(self, gpus: int) -> bool:
        """Return whether every rank of the host finds a GPU, where this one sees `gpus`."""
        return gpus >= (1 if self.alone else self.ranks)

    def gpu(self, gpus: int) -> int:
        """Return the index of the GPU that the rank takes, of the `gpus` that it sees."""
        return 0 if self.alone else self.local % gpus


def seat_of(rank: int, world: int, env: Mapping[str, str], gpus: int) -> Seat:
    """Return the seat of a rank that is a process, started by a launcher or one of this host's `world`."""
    if not joined(env):
        return Seat(rank, world, False)
    here = tasks_here(env)
    if "LOCAL_WORLD_SIZE" in env or "SLURM_LOCALID" not in env:
        return Seat(int(env.get("LOCAL_RANK", rank)), here, False)
    return Seat(int(env["SLURM_LOCALID"]), here, alone=gpus == 1)


def launched_world() -> int:
    """Return how many ranks the launcher started on all hosts."""
    return int(os.environ["WORLD_SIZE"])


def one_host() -> bool:
    """Return whether all ranks of the run are on this host."""
    return not joined() or os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ["WORLD_SIZE"]


def open_files() -> float:
    """Return how many files this process may have open at once (`ulimit -n`); infinity where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def keep_sockets_short() -> None:
    """Move multiprocessing's Unix sockets to a folder with a short path where TMPDIR's path is too long.

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


@contextlib.contextmanager
def private_folder() -> Iterator[str]:
    """Create a folder that no other user can enter (mode 0700), and remove it at the end of the context.

    It lies in memory where there is room, else beside multiprocessing's sockets.
    """
    from multiprocessing import util

    def within(parent: str) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="engine-", dir=parent, ignore_cleanup_errors=True)

    try:
        room = os.statvfs(IN_MEMORY)
        folder = within(IN_MEMORY if room.f_bavail * room.f_frsize >= LEAST_ROOM else util.get_temp_dir())
    except OSError:
        folder = within(util.get_temp_dir())
    with folder as name:
        yield name


def inherited_files() -> int:
    """Return how many files this process inherited beside its three standard streams."""
    count = 0
    folder = Path("/proc/self/fd")
    for each in [*folder.iterdir()] if folder.is_dir() else []:
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            count += int(each.name) > 2 and os.get_inheritable(int(each.name))
    return count


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ranks_per_host(world: int) -> int:
    """Return how many of the run's `world` ranks are on each host, as the launcher says."""
    return tasks_here() if joined() else world
