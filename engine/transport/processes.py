"""Which transport there is between processes that compute on CPUs."""

from __future__ import annotations

import os

from torch.distributed import Store  # type: ignore[attr-defined]

from engine.environment import one_host
from engine.transport import Transport
from engine.transport.gloo import GlooTransport
from engine.transport.shared import SharedMemoryTransport, available
from engine.transport.waits import ANYWHERE, Waits


def without_shared_memory() -> str | None:
    """Why the processes of this run cannot use shared memory: words that follow "cannot be used"; None: they can."""
    if not one_host():
        return "between hosts"
    if not available():
        return "on this system (it needs Linux with memfd_create and eventfd)"
    return None


def between_processes(
    rank: int, world: int, store: Store, timeout_s: float, shared_memory: bool, waits: Waits = ANYWHERE
) -> Transport:
    """Shared memory, or gloo: on loopback where all ranks are on one host, else where GLOO_SOCKET_IFNAME says.

    `waits`: how a rank waits for messages.
    """
    if shared_memory:
        return SharedMemoryTransport(rank, world, store, timeout_s, waits)
    interface = None if one_host() else os.environ.get("GLOO_SOCKET_IFNAME", "")
    return GlooTransport(rank, world, store, timeout_s, interface, waits)
