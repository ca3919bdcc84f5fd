"""How a rank's transport comes to be: through a store that all ranks of the run can reach."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from engine.job import Job
from engine.runtime.environment import one_host
from engine.runtime.transport import Transport
from engine.runtime.transport.gloo import GlooTransport


def client(address: tuple[str, int], timeout_s: float) -> Store:
    """A client of the store at `address`."""
    host, port = address
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def connect(job: Job, rank: int, store: Store) -> Transport:
    """The transport of a world rank: NCCL between GPUs, else gloo, on loopback where all ranks are on one host."""
    timeout_s = job.settings.timeout_s
    if job.settings.device == "cuda":
        from engine.runtime.build import device_of
        from engine.runtime.transport.nccl import NcclTransport  # builds of torch for CPUs have no NCCL

        return NcclTransport(rank, job.world, store, timeout_s, device_of(job, rank))
    interface = None if one_host() else os.environ.get("GLOO_SOCKET_IFNAME", "")
    return GlooTransport(rank, job.world, store, timeout_s, interface)
