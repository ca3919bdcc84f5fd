"""Create a rank's transport: the configured one, over a store that all ranks of the run can reach."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from engine.job import Job
from engine.settings import Settings
from engine.training.cores import waits_of
from engine.training.device import device_of
from engine.transport import Endpoint, Transport
from engine.transport.waits import ANYWHERE
from engine.transports import TransportInfo, choose_transport


def store_in(folder: str, timeout_s: float) -> Store:
    """A client of the store in a folder, which only those who may enter the folder can read or write.

    A store that listens on a port takes any local user's word, and the ranks find each other by what is in it.
    """
    store = FileStore(str(Path(folder, "store")))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def transport_of(settings: Settings) -> TransportInfo:
    """Return the transport of a run, whose device is chosen. ValueError where the configured one cannot be used."""
    return choose_transport(settings.transport, settings.launch, settings.device)


def connect(job: Job, rank: int, meeting: Any) -> Transport:
    """Make the transport of a world rank; the ranks meet at `meeting`, a store or the hub of threads."""
    info = transport_of(job.settings)
    waits = ANYWHERE if info.stream_ordered else waits_of(job, rank)
    in_place = job.settings.allreduce.shared_buckets == "auto"
    device, timeout_s = device_of(job, rank), job.settings.timeout_s
    made: Transport = info.open(Endpoint(rank, job.world, meeting, timeout_s, device, waits, in_place))
    return made
