"""Channels between processes of one host through memory that both see (Linux).

    sender                                                  receiver
    fill a slot ── entry k: (segment, offset, bytes) ──►    the ring of entries
                └─ eventfd "arrived" += 1 ─────────────►    wakes the thread that waits, which copies the slot out
    slot is free again  ◄───────────── eventfd "taken" += 1 ┘

One wake-up carries a message across, and no thread stands between the two that compute; a socket's way takes two, the
backend's thread and then ours. A send never blocks: the slots grow with what is under way, and an event counter is
never full. A tensor that was copied into a slot is done with at once; a slot that the caller fills itself (`empty`) is
done with when its message was taken, and who waits for that fills the posted receives of its rank meanwhile.

The two ends meet over a Unix socket without a name in the file system, which then hands over descriptors and tells, by
closing, that the peer is gone. Both sides see to it that the other is a process of the same user (`credentials.py`).

Sums over groups are gloo's, as between hosts: they are short (norms, counts), or asked for by name (native).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from engine.errors import ExhaustedError
from engine.transport import Channel, Edge, PeerLost, PeerTimeout, Work
from engine.transport.credentials import StrangerError, check_ours, is_ours
from engine.transport.ends import ReceivingEnd, SendingEnd, introduction
from engine.transport.gloo import GlooTransport
from engine.transport.waits import ANYWHERE, Waits


def available() -> bool:
    """Whether this system has what the transport is made of."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "eventfd")


class SharedMemoryTransport:
    """A rank's ends. `timeout_s` limits connecting and every wait. All ranks are processes (or threads) of one host."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world: int, store: Store, timeout_s: float, waits: Waits = ANYWHERE) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self.waits = waits
        self.aborted = False
        self._store = store
        self._ends: dict[Edge, SendingEnd | ReceivingEnd] = {}
        self._groups: GlooTransport | None = None
        self._opened = 0

    def open(self, edges: Sequence[Edge]) -> None:
        """Every receiver listens, every sender connects; the first bytes say which edge it is."""
        mine = [edge for edge in edges if self.rank in (edge.src, edge.dst)]
        incoming = [edge for edge in mine if edge.dst == self.rank]
        deadline = time.monotonic() + self.timeout_s
        self._opened += 1
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            name = f"engine-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(max(1, len(incoming)))
            self._store.set(self._key(self.rank), name)
            for edge in mine:
                if edge.src == self.rank:
                    self._ends[edge] = SendingEnd(self, edge, self._connect(edge, deadline))
            for _ in incoming:
                missing = [edge for edge in incoming if edge not in self._ends]
                edge, end, handed = _accept(listener, missing, deadline, self.timeout_s)
                self._ends[edge] = ReceivingEnd(self, edge, end, handed)

    def _key(self, rank: int) -> str:
        return f"shared/{self._opened}/{rank}"

    def _connect(self, edge: Edge, deadline: float) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._store.wait([self._key(edge.dst)], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            end.connect("\0" + self._store.get(self._key(edge.dst)).decode())
            check_ours(end, f"connecting {edge}, peer {edge.dst}")
        except StrangerError:
            end.close()
            raise
        except (RuntimeError, OSError) as error:
            end.close()
            what = f"connecting {edge}, peer {edge.dst}"
            if "timeout" in str(error).lower():
                raise PeerTimeout(f"{what}: nothing for {self.timeout_s:g} s", edge.dst) from None
            raise PeerLost(f"{what}: {error}", edge.dst) from None
        return end

    def channel(self, edge: Edge) -> Channel:
        return self._ends[edge]

    def fill_posted(self) -> None:
        """Take what has arrived for receives that are posted: the other side may wait for that before it sends more."""
        for end in self._ends.values():
            if isinstance(end, ReceivingEnd):
                end.fill_posted()

    def open_group(self, members: Sequence[int], label: str) -> None:
        if self._groups is None:
            self._groups = GlooTransport(self.rank, self.world, self._store, self.timeout_s)
        self._groups.open_group(members, label)

    def all_reduce(self, tensor: Tensor, members: Sequence[int], label: str) -> Work:
        assert self._groups is not None, "no group was opened"
        return self._groups.all_reduce(tensor, members, label)

    def check(self) -> None:
        """Nothing: a process is killed where another has failed."""

    def close(self) -> None:
        for end in self._ends.values():
            end.close()
        self._ends.clear()
        if self._groups is not None:
            self._groups.close()

    def abort(self) -> None:
        self.aborted = True
        for end in list(self._ends.values()):
            end.shut()
        if self._groups is not None:
            self._groups.abort()


def _accept(
    listener: socket.socket, missing: Sequence[Edge], deadline: float, timeout_s: float
) -> tuple[Edge, socket.socket, list[int]]:
    """The next sender that comes: its edge, its socket, and the descriptors it hands over."""
    while True:
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            end, _ = listener.accept()
            end.settimeout(max(0.001, deadline - time.monotonic()))
            if not is_ours(end):
                end.close()
                continue
            data, handed, _, _ = socket.recv_fds(end, 4096, 3)
        except TimeoutError:
            edge = missing[0]
            raise PeerTimeout(f"connecting {edge}, peer {edge.src}: nothing for {timeout_s:g} s", edge.src) from None
        if data and len(handed) < 3:
            end.close()
            for fd in handed:
                os.close(fd)
            raise ExhaustedError(errno.EMFILE, "too many open files to meet the other ranks")
        for edge in missing:
            if data == introduction(edge):
                end.settimeout(None)
                return edge, end, handed
        for fd in handed:
            os.close(fd)
        end.close()
        if data:  # a peer that died while connecting says nothing; somebody else reports that
            raise ValueError(
                f"a peer opens {data.decode(errors='replace')}, which is none of {', '.join(map(str, missing))}"
            )
