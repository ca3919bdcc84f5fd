"""Every transport in one table: what it can connect, and which of them a run gets.

A transport is one file with a function `make(endpoint)` that returns a rank's `engine.transport.Transport`, and one row
here. The choices of `transport=`, what `auto` takes, and every refusal come from the rows. Pure data: what a row names
is imported when a transport is made.
"""

from __future__ import annotations

import os
import sys
from collections import ChainMap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from engine.environment import one_host
from engine.registry import load

AUTO = "auto"


@dataclass(frozen=True)
class TransportInfo:
    """A transport by name, and what it can do.

    `launch`: what its ranks are, "processes" or "threads". `devices`: where the tensors that it carries may lie.
    `same_host`: whether all ranks must be on one host. `stream_ordered`: whether a wait lets the current stream of a
    GPU wait, and returns at once. `pollable`: whether an operation under way can be asked if it is done. `backend`: the
    transport that makes the groups of `allreduce=native`, where it is another. `files_per_end` and `files_per_rank`:
    files that a process has open for an end of a channel, and once for all of them; None where they are not counted.
    `missing` says what the system lacks, in words that follow "cannot be used".
    """

    name: str
    summary: str
    make: str
    launch: str
    devices: tuple[str, ...]
    same_host: bool = False
    stream_ordered: bool = False
    pollable: bool = True
    backend: str | None = None
    files_per_end: int | None = None
    files_per_rank: int = 0
    missing: Callable[[], str | None] = lambda: None

    def open(self, endpoint: Any) -> Any:
        """Make the transport of one rank; `endpoint` is an `engine.transport.Endpoint`."""
        return load(self.make)(endpoint)

    def obstacle(self, launch: str, device: str) -> str | None:
        """Why a run cannot use it, in words that follow "cannot be used"; None where it can."""
        if launch != self.launch:
            shared = "share one" if launch == "threads" else "do not share a"
            return f"with launch={launch}, whose ranks {shared} process"
        if device not in self.devices:
            return {"cpu": "between CPUs", "cuda": "between GPUs"}[device]
        if self.same_host and not one_host():
            return "between hosts"
        return self.missing()


def shared_memory_missing() -> str | None:
    """Say why this system has no shared memory for messages; None where it has."""
    if sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "eventfd"):
        return None
    return "on this system (it needs Linux with memfd_create and eventfd)"


# `auto` takes the first that can be used.
TRANSPORTS: dict[str, TransportInfo] = {
    info.name: info
    for info in (
        TransportInfo(
            "threads",
            "queues between the threads of one process",
            "engine.transport.threads:make",
            "threads",
            ("cpu", "cuda"),
            same_host=True,
            stream_ordered=True,
        ),
        TransportInfo(
            "shared_memory",
            "memory that the processes of one Linux host map",
            "engine.transport.shared:make",
            "processes",
            ("cpu",),
            same_host=True,
            backend="gloo",
            files_per_end=4,  # a socket, two event counters, the ring; its segments come with its messages
            missing=shared_memory_missing,
        ),
        TransportInfo(
            "gloo",
            "TCP, on loopback where all ranks are on one host",
            "engine.transport.gloo:make",
            "processes",
            ("cpu",),
            pollable=False,
            files_per_end=1,
            files_per_rank=4,  # the device that all its groups share
        ),
        TransportInfo(
            "nccl",
            "NCCL between GPUs, one to a rank",
            "engine.transport.nccl:make",
            "processes",
            ("cuda",),
            stream_ordered=True,
        ),
    )
}
# What `transport=` may be; a transport that is added to the table is a choice at once.
TRANSPORT_CHOICES: Collection[str] = ChainMap[str, Any](TRANSPORTS, {AUTO: None})


def choose_transport(wanted: str, launch: str, device: str) -> TransportInfo:
    """Return the transport that `transport=wanted` means for ranks that are `launch` and compute on `device`.

    ValueError where it cannot be used there.
    """
    fitting = [info for info in TRANSPORTS.values() if info.obstacle(launch, device) is None]
    if wanted == AUTO:
        return fitting[0]
    chosen = TRANSPORTS[wanted]
    if why := chosen.obstacle(launch, device):
        raise ValueError(
            f"transport={wanted} cannot be used {why}; use transport=auto, which takes {fitting[0].name} there"
        )
    return chosen
