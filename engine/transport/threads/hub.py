"""All ranks are threads of one process; a hub holds what they share.

Messages meet in `queues`, sums in `sums`, and `timeouts` limits every wait.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.transport import AnyMemory, Channel, Edge, Endpoint, PeerLost, PlainMemory, Work
from engine.transport.threads.queues import Queues
from engine.transport.threads.sums import SumGroup
from engine.transport.threads.timeouts import Timeouts


class ThreadHub:
    """What the ranks of one run share, where they are threads. `timeout_s` limits every wait."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world = world
        self._timeouts = Timeouts(timeout_s)
        self._lock = threading.Lock()
        self._opened: list[list[Edge]] = []
        self._calls: Counter[int] = Counter()
        self._queues: dict[Edge, Queues] = {}
        self._groups: dict[tuple[tuple[int, ...], str], SumGroup] = {}

    def transport(self, rank: int) -> ThreadTransport:
        """Return the transport of `rank`, for its thread."""
        return ThreadTransport(self, rank)

    def abort(self) -> None:
        """End every wait of every rank, present and future, with PeerLost; from any thread."""
        self._timeouts.abort()

    @property
    def aborted(self) -> bool:
        """Whether the run was aborted."""
        return self._timeouts.aborted

    def open(self, rank: int, edges: Sequence[Edge]) -> None:
        """Open a rank's edges; ValueError where it passes another list than the ranks before it in the same call."""
        with self._lock:
            if self._calls[rank] == len(self._opened):
                self._opened.append(list(edges))
            first = self._opened[self._calls[rank]]
            self._calls[rank] += 1
            for mine, theirs in zip(edges, first, strict=False):
                if mine != theirs:
                    raise ValueError(f"rank {rank} opens {mine} where another rank opens {theirs}")
            if len(edges) != len(first):
                raise ValueError(f"rank {rank} opens {len(edges)} channels, another rank {len(first)}")
            for edge in edges:
                if edge not in self._queues:
                    self._queues[edge] = Queues(edge, self._timeouts)

    @property
    def unmatched(self) -> int:
        """Number of sends without a receive and receives without a send; 0 between two steps."""
        return sum(queues.length for queues in self._queues.values())

    def queues(self, edge: Edge) -> Queues:
        """Return the queues of an edge that was opened."""
        return self._queues[edge]

    def group(self, members: tuple[int, ...], label: str) -> SumGroup:
        """Return the sums over `members` with this label, the same for all of them."""
        with self._lock:
            if (members, label) not in self._groups:
                self._groups[members, label] = SumGroup(members, label, self._timeouts)
            return self._groups[members, label]


class _ThreadChannel(AnyMemory):
    """One end of an edge."""

    def __init__(self, edge: Edge, queues: Queues) -> None:
        self.edge = edge
        self.bytes_sent = 0
        self._queues = queues

    def isend(self, tensor: Tensor) -> Work:
        work = self._queues.post("send", tensor)
        self.bytes_sent += tensor.nbytes
        return work

    def irecv(self, tensor: Tensor) -> Work:
        return self._queues.post("receive", tensor)


class ThreadTransport(PlainMemory):
    """One rank's ends; made by `ThreadHub.transport`."""

    device = torch.device("cpu")

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.rank = rank
        self.world = hub.world
        self.hub = hub
        self._channels: dict[Edge, _ThreadChannel] = {}

    def open(self, edges: Sequence[Edge]) -> None:
        """Connect this rank's ends of `edges`; all ranks call equally often, with the same lists."""
        self.hub.open(self.rank, edges)
        for edge in edges:
            if self.rank in (edge.src, edge.dst):
                self._channels[edge] = _ThreadChannel(edge, self.hub.queues(edge))

    def channel(self, edge: Edge) -> Channel:
        """Return this rank's end of an edge that was opened."""
        return self._channels[edge]

    def open_group(self, members: Sequence[int], label: str, backend: bool = False) -> None:
        """Connect the members of later sums."""
        self.hub.group(tuple(members), label)

    def all_reduce(self, tensor: Tensor, members: Sequence[int], label: str) -> Work:
        """Start a sum over `members`, in place; the last member to call adds the parts in rank order."""
        return self.hub.group(tuple(members), label).join(self.rank, tensor)

    def check(self) -> None:
        """Raise PeerLost where the run was aborted."""
        if self.hub.aborted:
            raise PeerLost("the run was aborted", None)

    def close(self) -> None:
        """Forget this rank's channels."""
        self._channels.clear()

    def abort(self) -> None:
        """End the run: every rank's waits raise PeerLost."""
        self.hub.abort()


def make(endpoint: Endpoint) -> ThreadTransport:
    """Make the transport of one thread; `endpoint.meeting` is the hub of all."""
    hub: ThreadHub = endpoint.meeting
    return hub.transport(endpoint.rank)
