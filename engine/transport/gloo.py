"""Channels between processes on CPUs: gloo over TCP, on loopback unless an interface is named.

All groups of a rank share one device, that is one thread that moves bytes. A receive that is posted before its
message arrives costs one pass over the wire; posted later, it costs three (offer, request, payload).

gloo's own abort does not reach a blocked wait, but a time limit that expires does: it closes the connections of its
group, and with them every other wait on that group ends, on both sides. So abort lets one expire.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from engine.environment import one_host
from engine.transport import Endpoint
from engine.transport.c10d import ABORT_TAG, C10dTransport
from engine.transport.waits import ANYWHERE, Waits
from engine.transports import TRANSPORTS

LOOPBACK = "127.0.0.1"


def make(endpoint: Endpoint) -> GlooTransport:
    """Make the transport of one process: on loopback where all are on one host, else where GLOO_SOCKET_IFNAME says."""
    interface = None if one_host() else os.environ.get("GLOO_SOCKET_IFNAME", "")
    return GlooTransport(endpoint.rank, endpoint.world, endpoint.meeting, endpoint.timeout_s, interface, endpoint.waits)


class GlooTransport(C10dTransport):
    """Channels and sums over gloo between processes that compute on CPUs.

    `interface`: None listens on loopback only; else the name of an interface that the other hosts reach, or "" for the
    one that this host's name resolves to. `timeout_s` limits connecting and every wait.
    """

    info = TRANSPORTS["gloo"]

    def __init__(
        self,
        rank: int,
        world: int,
        store: Store,
        timeout_s: float,
        interface: str | None = None,
        waits: Waits = ANYWHERE,
    ) -> None:
        super().__init__(rank, world, store, timeout_s, torch.device("cpu"), waits)
        make, before = ProcessGroupGloo, _threads()
        if interface is None:
            self._shared = make.create_device(hostname=LOOPBACK)
        else:
            self._shared = make.create_device(interface=interface) if interface else make.create_default_device()
        self.waits.also(sorted(_threads() - before))

    def _connect(self, store: Store, rank: int, size: int) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._shared]
        options._threads = 1  # used by all-reduce alone
        options._timeout = self.timeout
        return ProcessGroupGloo(store, rank, size, options)

    def _break(self, group: Any, rank: int) -> None:
        try:
            nothing = torch.empty(1, dtype=torch.uint8)
            group.recv([nothing], 1 if rank == 0 else 0, ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # the expiry itself, or the connection was closed already


def _threads() -> set[int]:
    """The native numbers of this process's threads, where the system tells."""
    try:
        return {int(each.name) for each in Path("/proc/self/task").iterdir()}
    except OSError:
        return set()
