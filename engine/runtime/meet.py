"""How a rank's transport comes to be: through a store that all ranks of the run can reach."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from engine.job import Job
from engine.runtime.transport import Transport


def client(address: tuple[str, int], timeout_s: float) -> dist.Store:
    """A client of the store at `address`."""
    host, port = address
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def connect(job: Job, rank: int, store: dist.Store) -> Transport:
    """The transport of a world rank: NCCL between GPUs, gloo else."""
    from engine.runtime.transport.gloo import GlooTransport

    return GlooTransport(store, rank, job.world, job.settings.timeout_s)
