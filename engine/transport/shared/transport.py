"""Channels between processes of one host through memory that both see (Linux).

    sender                                                  receiver
    fill a slot ── entry k: (segment, offset, bytes) ──►    the ring of entries
                └─ eventfd "arrived" += 1 ─────────────►    wakes the thread that waits, which copies the slot out
    slot is free again  ◄───────────── eventfd "taken" += 1 ┘

A message that lies in memory that the receiver has mapped (`memory.py`) needs no slot, and a receiver may read any
message where it lies (`iview`): buckets of gradients are combined straight out of the neighbour's memory.

One wake-up carries a message across, and no thread stands between the two that compute; a socket's way takes two, the
backend's thread and then ours. A send never blocks: the slots grow with what is under way, and an event counter is
never full. A tensor that was copied into a slot is done with at once; a slot that the caller fills itself (`empty`) is
done with when its message was taken, and who waits for that fills the posted receives of its rank meanwhile.

The two ends meet over a Unix socket (`sockets.py`), which then hands over descriptors and tells, by closing, that the
peer is gone.

Short sums (norms, counts) go over sockets of the same kind (`exchange.py`). The backend's own, which is asked for by
name (native), is gloo's, as between hosts.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from engine.errors import ExhaustedError
from engine.transport import Channel, Edge, Endpoint, PeerTimeout, Work
from engine.transport.c10d import Finished, check_reducible, sum_over
from engine.transport.gloo import GlooTransport
from engine.transport.shared.ends import IN_PLACE_BYTES, ReceivingEnd, SendingEnd, introduction
from engine.transport.shared.exchange import Exchange, meet
from engine.transport.shared.memory import Regions
from engine.transport.sockets import Limit, accepted, connected, listening
from engine.transport.waits import ANYWHERE, Waits


def make(endpoint: Endpoint) -> SharedMemoryTransport:
    """Make the transport of one process."""
    return SharedMemoryTransport(
        endpoint.rank, endpoint.world, endpoint.meeting, endpoint.timeout_s, endpoint.waits, endpoint.in_place
    )


class SharedMemoryTransport:
    """A rank's ends of channels in shared memory, and its sums over sockets.

    `timeout_s` limits connecting and every wait. All ranks are processes (or threads) of one host.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        rank: int,
        world: int,
        store: Store,
        timeout_s: float,
        waits: Waits = ANYWHERE,
        in_place: bool = True,
    ) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self.waits = waits
        self.aborted = False
        self._store = store
        self.regions = Regions()
        self._in_place = in_place
        self._ends: dict[Edge, SendingEnd | ReceivingEnd] = {}
        self._sums: dict[tuple[tuple[int, ...], str], Exchange] = {}
        self._groups: GlooTransport | None = None
        self._opened = 0

    def open(self, edges: Sequence[Edge]) -> None:
        """Connect this rank's ends of `edges`; all ranks call equally often, with the same lists.

        Every receiver listens, every sender connects; the first bytes say which edge it is.
        """
        mine = [edge for edge in edges if self.rank in (edge.src, edge.dst)]
        incoming = [edge for edge in mine if edge.dst == self.rank]
        limit = Limit(self.timeout_s)
        self._opened += 1
        with listening(self._store, self._key(self.rank), len(incoming)) as listener:
            for edge in mine:
                if edge.src == self.rank:
                    end = connected(self._store, self._key(edge.dst), limit, f"connecting {edge}", edge.dst)
                    self._ends[edge] = SendingEnd(self, edge, end)
            for _ in incoming:
                missing = [edge for edge in incoming if edge not in self._ends]
                edge, end, handed = _accept(listener, missing, limit)
                self._ends[edge] = ReceivingEnd(self, edge, end, handed)

    def _key(self, rank: int) -> str:
        return f"shared/{self._opened}/{rank}"

    def channel(self, edge: Edge) -> Channel:
        """Return this rank's end of an edge that was opened."""
        return self._ends[edge]

    def memory(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory that other ranks read where it lies."""
        if not self._in_place or device.type != "cpu" or nbytes < IN_PLACE_BYTES:
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return self.regions.allot(nbytes)

    def fill_posted(self) -> None:
        """Fill the posted receives whose messages have arrived.

        The other side may wait for that before it sends more.
        """
        for end in self._ends.values():
            if isinstance(end, ReceivingEnd):
                end.fill_posted()

    def open_group(self, members: Sequence[int], label: str, backend: bool = False) -> None:
        """Connect the members of later sums: by sockets, or by gloo where they are to be the backend's own."""
        if not backend:
            self._sums[tuple(members), label] = Exchange(
                self, members, sum_over(members, label), meet(self, members, label, self._store)
            )
            return
        if self._groups is None:
            self._groups = GlooTransport(self.rank, self.world, self._store, self.timeout_s)
        self._groups.open_group(members, label, backend)

    def all_reduce(self, tensor: Tensor, members: Sequence[int], label: str) -> Work:
        """Start a sum over `members`, in place; ValueError for a dtype that cannot be added."""
        exchange = self._sums.get((tuple(members), label))
        if exchange is None:
            assert self._groups is not None, "the group was not opened"
            return self._groups.all_reduce(tensor, members, label)
        check_reducible(tensor, sum_over(members, label))
        return exchange.start(tensor) if tensor.numel() else Finished()

    def check(self) -> None:
        """Do nothing: a process is killed where another rank has failed."""

    def close(self) -> None:
        """Close every channel and group; call it after the last wait."""
        for end in self._ends.values():
            end.close()
        self._ends.clear()
        self.regions.close()
        for exchange in self._sums.values():
            exchange.close()
        self._sums.clear()
        if self._groups is not None:
            self._groups.close()

    def abort(self) -> None:
        """End every wait of this rank with PeerLost, from any thread."""
        self.aborted = True
        for end in list(self._ends.values()):
            end.shut()
        for exchange in list(self._sums.values()):
            exchange.shut()
        if self._groups is not None:
            self._groups.abort()


def _accept(listener: socket.socket, missing: Sequence[Edge], limit: Limit) -> tuple[Edge, socket.socket, list[int]]:
    """The next sender that comes: its edge, its socket, and the descriptors it hands over."""
    while True:
        try:
            end, data, handed = accepted(listener, limit, 3)
        except TimeoutError:
            edge = missing[0]
            what = f"connecting {edge}, peer {edge.src}"
            raise PeerTimeout(f"{what}: nothing for {limit.limit_s:g} s", edge.src) from None
        if data and len(handed) < 3:
            end.close()
            for fd in handed:
                os.close(fd)
            raise ExhaustedError(errno.EMFILE, "too many open files to meet the other ranks")
        for edge in missing:
            if data == introduction(edge):
                return edge, end, handed
        for fd in handed:
            os.close(fd)
        end.close()
        if data:  # a peer that died while connecting says nothing; somebody else reports that
            raise ValueError(
                f"a peer opens {data.decode(errors='replace')}, which is none of {', '.join(map(str, missing))}"
            )
