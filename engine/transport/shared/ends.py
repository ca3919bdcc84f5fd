"""The two ends of a channel in shared memory: who fills slots, and who copies them out.

SendingEnd ── entry k of the ring: segment, offset, bytes ──► ReceivingEnd
              arrived += 1, taken += 1: event counters, which wake the other side
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.transport import AnyMemory, Edge, PeerLost, PeerTimeout, Work
from engine.transport.c10d import as_bytes
from engine.transport.shared.memory import Regions
from engine.transport.shared.segments import Mapped, Segments, Slot, refused
from engine.transport.waits import Waits

RING = 2**13  # entries: messages of one channel that may be under way at once
_ENTRY = struct.Struct("=3q")  # segment, offset, bytes
_RING_BYTES = RING * _ENTRY.size
_ATTENTION_S = 0.02  # how long a rank that waits for a send leaves its posted receives alone
_SIZE = struct.Struct("q")
IN_PLACE_BYTES = 2**16  # smaller messages are copied: that takes less than to wait until they were read


class Owner(Protocol):
    """What an end needs to know of the rank that it belongs to."""

    rank: int
    timeout_s: float
    aborted: bool
    waits: Waits
    regions: Regions

    def fill_posted(self) -> None:
        """Fill the posted receives of the rank whose messages have arrived."""


def introduction(edge: Edge) -> bytes:
    """Return the first bytes that a sender sends: they say which edge its socket is."""
    return f"{edge.src} {edge.dst} {edge.label}".encode()


class _End(AnyMemory):
    """What both ends of a channel have: the socket, the ring of entries, the two event counters."""

    def __init__(self, transport: Owner, edge: Edge, peer: int, end: socket.socket) -> None:
        self.edge = edge
        self.bytes_sent = 0
        self._transport = transport
        self._peer = peer
        self._socket = end
        self._fds: list[int] = []

    def _take(self, entries: int, arrived: int, taken: int) -> None:
        """Map the ring, keep the counters."""
        self._ring = mmap.mmap(entries, _RING_BYTES)
        os.close(entries)
        self._fds = [arrived, taken]
        self._arrived_fd, self._taken_fd = arrived, taken

    def isend(self, tensor: Tensor) -> Work:
        """Refuse: this end only receives."""
        raise ValueError(f"{self.edge}: rank {self._transport.rank} only receives on it")

    def irecv(self, tensor: Tensor) -> Work:
        """Refuse: this end only sends."""
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
            if patience and not self._transport.waits.keep(partial(self._poll.poll, patience)):
                return 0
        if self._transport.aborted:
            raise PeerLost(f"{self.what()}: this rank was aborted", self._peer)
        raise PeerLost(f"{self.what()}: the peer closed its end", self._peer)

    def _entry(self, number: int) -> tuple[int, int, int]:
        """Segment, offset and bytes of message `number`."""
        segment, offset, nbytes = _ENTRY.unpack_from(self._ring, number % RING * _ENTRY.size)
        return segment, offset, nbytes

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
    """Puts messages into slots. What lies in memory that the receiver maps, of `empty` or a region, is not copied."""

    def __init__(self, transport: Owner, edge: Edge, end: socket.socket) -> None:
        super().__init__(transport, edge, edge.dst, end)
        self._segments = Segments(self._announce)
        self._own: dict[int, Slot] = {}  # address -> slot that was handed out by `empty`
        self._under_way: deque[Slot | None] = deque()  # None: sent from where it lay, nothing to give back
        self._shared: dict[int, int] = {}  # descriptor of a region -> number of its segment on this channel
        self._sent = self._taken = 0
        entries = os.memfd_create("engine-ring", os.MFD_CLOEXEC)
        os.ftruncate(entries, _RING_BYTES)
        arrived, taken = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        socket.send_fds(end, [introduction(edge)], [entries, arrived, taken])
        self._take(entries, arrived, taken)
        self._watch(taken)

    def _announce(self, fd: int, nbytes: int) -> None:
        try:
            socket.send_fds(self._socket, [_SIZE.pack(nbytes)], [fd])
        except OSError as error:
            raise PeerLost(f"send on {self.edge}, peer {self._peer}: {error}", self._peer) from None

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return a slot of shared memory, uint8 [nbytes], that is sent without a copy."""
        slot = self._segments.slot(nbytes)
        self._own[slot.memory.data_ptr()] = slot
        return slot.memory[:nbytes]

    def isend(self, tensor: Tensor) -> Work:
        """Post a send of a contiguous tensor, which must stay as it is until the work is waited for."""
        data = as_bytes(tensor, self.edge)
        nbytes = data.numel()
        if self._sent - self._taken == RING:  # rather wait than overwrite an entry that was not read
            self.wait(self._sent - RING)
        place, slot = self._lies(data.data_ptr(), nbytes), None
        if place is None:
            self.taken()
            slot = self._segments.slot(nbytes)
            slot.memory[:nbytes].copy_(data)
            place = slot.segment, slot.offset
        _ENTRY.pack_into(self._ring, self._sent % RING * _ENTRY.size, *place, nbytes)
        os.eventfd_write(self._arrived_fd, 1)
        self._under_way.append(slot)
        self.bytes_sent += nbytes
        self._sent += 1
        return _Sent(self, self._sent - 1, copied=slot is not None)

    def _lies(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Segment and offset of a message that can be sent from where it lies."""
        if (own := self._own.get(address) if nbytes else None) is not None:
            return own.segment, own.offset
        region = self._transport.regions.find(address, nbytes) if nbytes >= IN_PLACE_BYTES else None
        if region is None:
            return None
        if region.fd not in self._shared:
            self._shared[region.fd] = self._segments.adopt(region.fd, region.nbytes)
        return self._shared[region.fd], address - region.begin

    def taken(self) -> int:
        """Number of messages that the receiver has copied out; their slots are free."""
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
        """Block until message `number` was taken."""
        if self.taken() > number:
            return
        deadline = time.monotonic() + self._transport.timeout_s
        while self._taken <= number:
            self._transport.fill_posted()
            self._count(self._next(_ATTENTION_S))
            if self._taken <= number and time.monotonic() > deadline:
                raise self.late()

    def check(self, number: int) -> None:
        """Raise PeerLost where message `number` is known never to be taken."""
        if self.taken() <= number and self._poll.poll(0):
            self._count(self._next(0))

    def what(self) -> str:
        """Name the wait for a send in messages."""
        return f"send of {self._entry(self._taken)[2]} bytes on {self.edge}, peer {self._peer}"


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
    """Copies messages out of slots into the buffers that were posted for them, or shows them in place; in order."""

    readable = True

    def __init__(self, transport: Owner, edge: Edge, end: socket.socket, handed: list[int]) -> None:
        super().__init__(transport, edge, edge.src, end)
        self._mapped = Mapped()
        self._posted: deque[_Receive | _View] = deque()
        self._viewed: _View | None = None  # whose message is being read in place
        self._arrived = self._read = 0
        self._unmapped: OSError | None = None  # why a segment could not be mapped
        self._lock = threading.Lock()  # held by whoever fills receives
        self._take(*handed)
        self._watch(self._arrived_fd)

    def irecv(self, tensor: Tensor) -> Work:
        """Post a receive into a contiguous tensor, which has its message once the work was waited for."""
        receive = _Receive(self, as_bytes(tensor, self.edge))
        self._posted.append(receive)
        return receive

    def iview(self, like: Tensor) -> _View:
        """Post a receive of a message of the size of `like` that is to be read where it lies."""
        view = _View(self, like)
        self._posted.append(view)
        return view

    def fill(self, receive: _Receive) -> None:
        """Wait for messages until this receive has its own."""
        with self._lock:
            while not receive.complete:
                self._message()
                self._copy(self._posted[0])

    def show(self, view: _View) -> Tensor:
        """Wait for the message of a view: its bytes, to be left alone by the sender until `free`."""
        with self._lock:
            while self._posted[0] is not view:
                self._message()
                self._copy(self._posted[0])
            self._message()
            segment, offset = self._place(view.nbytes)
            memory = self._mapped.view(segment, offset, view.nbytes)
            self._viewed = self._posted.popleft()  # type: ignore[assignment]
            return memory

    def free(self, view: _View) -> None:
        """Let the sender have the memory of a view back."""
        with self._lock:
            assert self._viewed is view, "messages are let go in the order in which they are read"
            self._viewed = None
            self._done()

    def _message(self) -> None:
        """Wait until a message has arrived that was not read."""
        assert self._viewed is None, "the message that is being read in place must be let go first"
        if self._read == self._arrived:
            more = self._next(self._transport.timeout_s)
            if not more:
                raise self.late()
            self._arrived += more

    def _done(self) -> None:
        self._read += 1
        os.eventfd_write(self._taken_fd, 1)

    def fill_posted(self) -> None:
        """Fill the receives whose messages have arrived, without waiting.

        A message of another size is left to whoever waits for it.
        """
        if self._posted and self._viewed is None and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(BlockingIOError):
                    self._arrived += os.eventfd_read(self._fd)
                while self._posted and self._read < self._arrived and isinstance(self._posted[0], _Receive):
                    self._copy(self._posted[0])
            except ValueError:
                pass
            finally:
                self._lock.release()

    def _copy(self, receive: _Receive | _View) -> None:
        """The message that has arrived into the first of the posted receives, which stays there where that fails."""
        assert isinstance(receive, _Receive), "the message that is to be read in place comes first"
        segment, offset = self._place(receive.nbytes)
        self._mapped.copy(segment, offset, receive.data, receive.memory)
        receive.complete = True
        self._posted.popleft()
        self._done()

    def _place(self, expected: int) -> tuple[int, int]:
        """Segment and offset of the message that has arrived. ValueError where it has another size, OSError."""
        segment, offset, nbytes = self._entry(self._read)
        if nbytes != expected:
            raise ValueError(
                f"{self.edge}: rank {self.edge.src} sends {nbytes} bytes, rank {self.edge.dst} receives {expected}"
            )
        try:
            self._map(segment)
        except OSError as error:
            self._unmapped = self._unmapped or error
            raise
        return segment, offset

    def _map(self, segment: int) -> None:
        """Map what was announced before the message that lies in it.

        OSError, now and ever after, where that cannot be: the descriptor has come and gone.
        """
        while segment >= len(self._mapped):
            if self._unmapped is not None:
                raise self._unmapped
            data, handed, _, _ = socket.recv_fds(self._socket, _SIZE.size, 1)
            (nbytes,) = _SIZE.unpack(data)
            with refused(nbytes):
                if not handed:  # the system drops a descriptor that this process has no room for
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._mapped.add(handed[0], nbytes)

    def what(self) -> str:
        """Name the wait for a receive in messages."""
        nbytes = self._posted[0].nbytes if self._posted else 0
        return f"receive of {nbytes} bytes on {self.edge}, peer {self._peer}"


class _Receive:
    """A posted receive. Keeps its buffer."""

    __slots__ = ("_end", "complete", "data", "memory", "nbytes")

    def __init__(self, end: ReceivingEnd, data: Tensor) -> None:
        self._end, self.data, self.complete = end, data, False
        self.memory = data.numpy().data
        self.nbytes = len(self.memory)

    def done(self) -> bool:
        return self.complete

    def wait(self) -> None:
        if not self.complete:
            self._end.fill(self)


class _View:
    """A message that is read where it lies: an `Arrival`."""

    __slots__ = ("_dtype", "_end", "nbytes")

    def __init__(self, end: ReceivingEnd, like: Tensor) -> None:
        self._end, self._dtype, self.nbytes = end, like.dtype, like.nbytes

    def wait(self) -> Tensor:
        return self._end.show(self).view(self._dtype)

    def free(self) -> None:
        self._end.free(self)
