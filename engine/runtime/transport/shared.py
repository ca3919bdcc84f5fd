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
closing, that the peer is gone. Only processes of the same user are let in.

Sums over groups are gloo's, as between hosts: they are short (norms, counts), or asked for by name (native).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from engine.runtime.transport import Channel, Edge, PeerLost, PeerTimeout, Work
from engine.runtime.transport.c10d import as_bytes
from engine.runtime.transport.gloo import GlooTransport
from engine.runtime.transport.segments import Mapped, Segments, Slot

RING = 2**16  # entries: messages of one channel that may be under way at once
_ENTRY = 3  # words of an entry: segment, offset, bytes
_RING_BYTES = RING * _ENTRY * 8
_ATTENTION_S = 0.02  # how long a rank that waits for a send leaves its posted receives alone
_SIZE = struct.Struct("q")
_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group


def available() -> bool:
    """Whether this system has what the transport is made of."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "eventfd")


class SharedMemoryTransport:
    """A rank's ends. `timeout_s` limits connecting and every wait. All ranks are processes (or threads) of one host."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world: int, store: Store, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
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
            _, user, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user != os.geteuid():
                end.close()
                continue
            data, handed, _, _ = socket.recv_fds(end, 4096, 3)
        except TimeoutError:
            edge = missing[0]
            raise PeerTimeout(f"connecting {edge}, peer {edge.src}: nothing for {timeout_s:g} s", edge.src) from None
        for edge in missing:
            if data == _introduction(edge):
                end.settimeout(None)
                return edge, end, handed
        for fd in handed:
            os.close(fd)
        end.close()
        if data:  # a peer that died while connecting says nothing; somebody else reports that
            raise ValueError(f"a peer opens {data.decode(errors='replace')}, which is none of {list(missing)}")


def _introduction(edge: Edge) -> bytes:
    return f"{edge.src} {edge.dst} {edge.label}".encode()


class _End:
    """What both ends of a channel have: the socket, the ring of entries, the two event counters."""

    def __init__(self, transport: SharedMemoryTransport, edge: Edge, peer: int, end: socket.socket) -> None:
        self.edge = edge
        self.bytes_sent = 0
        self._transport = transport
        self._peer = peer
        self._socket = end
        self._fds: list[int] = []

    def _take(self, entries: int, arrived: int, taken: int) -> None:
        """Map the ring, keep the counters."""
        memory = mmap.mmap(entries, _RING_BYTES)
        self._ring = np.frombuffer(memory, np.int64).reshape(RING, _ENTRY)
        os.close(entries)
        self._fds = [arrived, taken]
        self._arrived_fd, self._taken_fd = arrived, taken

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def isend(self, tensor: Tensor) -> Work:
        raise ValueError(f"{self.edge}: rank {self._transport.rank} only receives on it")

    def irecv(self, tensor: Tensor) -> Work:
        raise ValueError(f"{self.edge}: rank {self._transport.rank} only sends on it")

    def _watch(self, fd: int) -> None:
        """`fd`: the counter that this end waits for."""
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._socket, select.POLLRDHUP)

    def _next(self, limit_s: float) -> int:
        """The counter, which becomes zero; waits up to `limit_s` while it is zero, and is 0 then. PeerLost."""
        for patience in (limit_s * 1e3, 0.0):
            with contextlib.suppress(BlockingIOError):
                return os.eventfd_read(self._fd)
            if patience and not self._poll.poll(patience):
                return 0
        if self._transport.aborted:
            raise PeerLost(f"{self.what()}: this rank was aborted", self._peer)
        raise PeerLost(f"{self.what()}: the peer closed its end", self._peer)

    def what(self) -> str:
        """What this end waits for."""
        raise NotImplementedError

    def late(self) -> PeerTimeout:
        return PeerTimeout(f"{self.what()}: nothing for {self._transport.timeout_s:g} s", self._peer)

    def shut(self) -> None:
        """Wake whoever waits on either side. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class SendingEnd(_End):
    """Puts messages into slots. Those of `empty` are filled by the caller and sent without a copy."""

    def __init__(self, transport: SharedMemoryTransport, edge: Edge, end: socket.socket) -> None:
        super().__init__(transport, edge, edge.dst, end)
        self._segments = Segments(self._announce)
        self._own: dict[int, Slot] = {}  # address -> slot that was handed out by `empty`
        self._under_way: deque[Slot | None] = deque()  # None: of `empty`, not ours to give back
        self._sent = self._taken = 0
        entries = os.memfd_create("engine-ring", os.MFD_CLOEXEC)
        os.ftruncate(entries, _RING_BYTES)
        arrived, taken = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        socket.send_fds(end, [_introduction(edge)], [entries, arrived, taken])
        self._take(entries, arrived, taken)
        self._watch(taken)

    def _announce(self, fd: int, nbytes: int) -> None:
        try:
            socket.send_fds(self._socket, [_SIZE.pack(nbytes)], [fd])
        except OSError as error:
            raise PeerLost(f"send on {self.edge}, peer {self._peer}: {error}", self._peer) from None

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        slot = self._segments.slot(nbytes)
        self._own[slot.memory.data_ptr()] = slot
        return slot.memory[:nbytes]

    def isend(self, tensor: Tensor) -> Work:
        data = as_bytes(tensor, self.edge)
        nbytes = data.numel()
        self.taken()
        if self._sent - self._taken == RING:  # rather wait than overwrite an entry that was not read
            self.wait(self._sent - RING)
        own = self._own.get(data.data_ptr()) if nbytes else None
        slot = own or self._segments.slot(nbytes)
        if own is None:
            slot.memory[:nbytes].copy_(data)
        self._under_way.append(None if own else slot)
        self._ring[self._sent % RING] = slot.segment, slot.offset, nbytes
        os.eventfd_write(self._arrived_fd, 1)
        self.bytes_sent += nbytes
        self._sent += 1
        return _Sent(self, self._sent - 1, copied=own is None)

    def taken(self) -> int:
        """Messages that the receiver has copied out; their slots are free."""
        with contextlib.suppress(BlockingIOError):
            self._count(os.eventfd_read(self._fd))
        return self._taken

    def _count(self, more: int) -> None:
        self._taken += more
        for _ in range(more):
            slot = self._under_way.popleft()
            if slot is not None:
                self._segments.give_back(slot)

    def wait(self, number: int) -> None:
        """Until message `number` was taken."""
        deadline = time.monotonic() + self._transport.timeout_s
        while self._taken <= number:
            self._transport.fill_posted()
            self._count(self._next(_ATTENTION_S))
            if self._taken <= number and time.monotonic() > deadline:
                raise self.late()

    def check(self, number: int) -> None:
        """PeerLost where message `number` will never be taken, as far as is known."""
        if self.taken() <= number and self._poll.poll(0):
            self._count(self._next(0))

    def what(self) -> str:
        return f"send of {int(self._ring[self._taken % RING, 2])} bytes on {self.edge}, peer {self._peer}"


class _Sent:
    """A message under way. `copied`: its tensor is done with."""

    __slots__ = ("_copied", "_end", "_number")

    def __init__(self, end: SendingEnd, number: int, copied: bool) -> None:
        self._end, self._number, self._copied = end, number, copied

    def done(self) -> bool:
        return self._copied or self._end.taken() > self._number

    def wait(self) -> None:
        if self._copied:
            self._end.check(self._number)
        else:
            self._end.wait(self._number)


class ReceivingEnd(_End):
    """Copies messages out of slots, into the buffers that were posted for them, in order."""

    def __init__(self, transport: SharedMemoryTransport, edge: Edge, end: socket.socket, handed: list[int]) -> None:
        super().__init__(transport, edge, edge.src, end)
        self._mapped = Mapped()
        self._posted: deque[_Receive] = deque()
        self._arrived = self._read = 0
        self._lock = threading.Lock()  # held by whoever fills receives
        self._take(*handed)
        self._watch(self._arrived_fd)

    def irecv(self, tensor: Tensor) -> Work:
        receive = _Receive(self, as_bytes(tensor, self.edge))
        self._posted.append(receive)
        return receive

    def fill(self, receive: _Receive) -> None:
        """Wait for messages until this receive has its own."""
        with self._lock:
            while not receive.complete:
                if self._read == self._arrived:
                    more = self._next(self._transport.timeout_s)
                    if not more:
                        raise self.late()
                    self._arrived += more
                self._copy(self._posted.popleft())

    def fill_posted(self) -> None:
        """Fill what has arrived for, without waiting. A message of another size is left to whoever waits for it."""
        if self._posted and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(BlockingIOError):
                    self._arrived += os.eventfd_read(self._fd)
                while self._posted and self._read < self._arrived:
                    self._copy(self._posted.popleft())
            except ValueError:
                pass
            finally:
                self._lock.release()

    def _copy(self, receive: _Receive) -> None:
        segment, offset, nbytes = self._ring[self._read % RING].tolist()
        if nbytes != receive.data.numel():
            self._posted.appendleft(receive)  # every later wait says the same
            raise ValueError(
                f"{self.edge}: rank {self.edge.src} sends {nbytes} bytes, "
                f"rank {self.edge.dst} receives {receive.data.numel()}"
            )
        while segment >= len(self._mapped):  # announced before the message that lies in it
            data, (fd,), _, _ = socket.recv_fds(self._socket, _SIZE.size, 1)
            self._mapped.add(fd, *_SIZE.unpack(data))
        receive.data.copy_(self._mapped.view(segment, offset, nbytes))
        receive.complete = True
        self._read += 1
        os.eventfd_write(self._taken_fd, 1)

    def what(self) -> str:
        nbytes = self._posted[0].data.numel() if self._posted else 0
        return f"receive of {nbytes} bytes on {self.edge}, peer {self._peer}"


class _Receive:
    """A posted receive. Keeps its buffer."""

    __slots__ = ("_end", "complete", "data")

    def __init__(self, end: ReceivingEnd, data: Tensor) -> None:
        self._end, self.data, self.complete = end, data, False

    def done(self) -> bool:
        return self.complete

    def wait(self) -> None:
        if not self.complete:
            self._end.fill(self)
