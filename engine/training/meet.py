"""How a rank's transport comes to be: through a store that all ranks of the run can reach."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from engine.job import Job
from engine.settings import Settings
from engine.training.cores import waits_of
from engine.transport import Transport
from engine.transport.processes import between_processes, without_shared_memory


def client(address: tuple[str, int], timeout_s: float) -> Store:
    """A client of the store at `address`."""
    host, port = address
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


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
