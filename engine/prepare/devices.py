"""CPUs or GPUs: whether there are enough, by the ranks of this host, not by those of the run.

    launch          ranks of this host                GPU of a rank
    processes       all                               rank
    threads         all, which may share one          rank modulo the GPUs
    torchrun        LOCAL_WORLD_SIZE                  LOCAL_RANK
    Slurm           tasks on this node                SLURM_LOCALID; 0 where each task sees one GPU alone

Pure functions of the settings, the environment and the number of visible GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.environment import Seat, seat_of
from engine.settings import Settings


def choose(settings: Settings, env: Mapping[str, str], gpus: int) -> str:
    """The device of a run, "cpu" or "cuda".

    `auto` takes GPUs where every rank of this host finds one of the `gpus` visible ones. ValueError where the GPUs that
    `device=cuda` asks for are not there.
    """
    shared = settings.launch == "threads"
    seat = seat_of(int(env.get("RANK", "0")), settings.world, env, gpus)
    enough = gpus > 0 and (shared or seat.enough(gpus))
    if settings.device == "auto":
        return "cuda" if enough else "cpu"
    if settings.device == "cuda" and not enough:
        raise ValueError(f"device=cuda, but {_too_few(settings, seat, gpus)}")
    return settings.device


def passed_over(settings: Settings, env: Mapping[str, str], gpus: int) -> str | None:
    """The line that says that `device=auto` took the CPUs of a host that has GPUs, and why; None elsewhere."""
    if settings.device != "auto" or not gpus or choose(settings, env, gpus) == "cuda":
        return None
    seat = seat_of(int(env.get("RANK", "0")), settings.world, env, gpus)
    return f"device=auto took the CPUs: {_too_few(settings, seat, gpus)}"


def _too_few(settings: Settings, seat: Seat, gpus: int) -> str:
    sizes = "" if seat.ranks != settings.world else " (pipeline.ranks x data_parallel.replicas)"
    return (
        f"this host has {gpus} visible GPUs for {seat.ranks} ranks{sizes}: start fewer ranks per host, or use "
        "device=cpu, or launch=threads to put several ranks on one GPU"
    )
