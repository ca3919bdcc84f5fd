"""How a rank's transport comes to be: through a store that all ranks of the run can reach."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from engine.job import Job
from engine.settings import Settings
from engine.training.cores import waits_of
from engine.transport import Transport
from engine.transport.processes import between_processes, without_shared_memory


def store_in(folder: str, timeout_s: float) -> Store:
    """A client of the store in a folder, which only those who may enter the folder can read or write.

    A store that listens on a port takes any local user's word, and the ranks find each other by what is in it.
    """
    store = FileStore(str(Path(folder, "store")))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def transport_of(settings: Settings) -> str:
    """The transport between CPU processes that `transport` asks for. ValueError where it is not to be had here."""
    why: str | None
    if settings.launch == "threads":
        why = "with launch=threads, whose ranks share one process"
    elif settings.device == "cuda":
        why = "between GPUs, which use NCCL"
    else:
        why = without_shared_memory()
    if settings.transport == "auto":
        return "gloo" if why else "shared_memory"
    if settings.transport == "shared_memory" and why:
        raise ValueError(f"transport=shared_memory cannot be used {why}; use transport=auto")
    return settings.transport


def connect(job: Job, rank: int, store: Store) -> Transport:
    """The transport of a world rank: NCCL between GPUs; between CPUs shared memory on one host, else gloo."""
    timeout_s = job.settings.timeout_s
    if job.settings.device == "cuda":
        from engine.training.device import device_of
        from engine.transport.nccl import NcclTransport

        return NcclTransport(rank, job.world, store, timeout_s, device_of(job, rank))
    shared_memory = transport_of(job.settings) == "shared_memory"
    return between_processes(rank, job.world, store, timeout_s, shared_memory, waits_of(job, rank))
