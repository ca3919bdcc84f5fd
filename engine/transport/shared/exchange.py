"""Sums of short tensors among processes of one host: each member sends its part to every other (Linux).

    rank 0 ── part of sum k ──► rank 1      one Unix socket for each two members; a part of more than `SHORT_BYTES`
           ◄── part of sum k ──             lies in anonymous memory, whose descriptor goes over the socket instead

All add the same parts in rank order and so get the same bits. To start never blocks: a part that a socket has no room
for is kept, and goes out with the next start or wait, at the latest the wait for its own sum. A wait needs of the
others no more than that they start that sum too, unless more sums are under way than a socket holds parts of: then also
that they await some.

The backend would do the same over ports that every user of the host can connect to. n members send n (n-1) parts: this
is for norms and counts, not for gradients.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from engine.transport import PeerLost, PeerTimeout
from engine.transport.shared.ends import Owner
from engine.transport.shared.segments import refused
from engine.transport.sockets import Limit, accepted, connected, listening

SHORT_BYTES = 4096  # of a part that goes through the socket itself, which has room for dozens of them
_BYTES = struct.Struct("q")  # of the part; it follows, or a descriptor comes along


def meet(owner: Owner, members: Sequence[int], label: str, store: Store) -> dict[int, socket.socket]:
    """Return a socket to each other member.

    Each member connects to those before it and is connected to by those behind it.
    """
    what, limit = f"connecting group {label} of ranks {list(members)}", Limit(owner.timeout_s)
    key = f"sum/{'-'.join(map(str, members))}/{label}"
    ends: dict[int, socket.socket] = {}
    missing = {member: f"{member} {key}".encode() for member in members if member > owner.rank}
    try:
        with listening(store, f"{key}/{owner.rank}", len(missing)) as listener:
            for member in members:
                if member < owner.rank:
                    says = f"{owner.rank} {key}".encode()
                    ends[member] = connected(store, f"{key}/{member}", limit, what, member, says)
            while missing:
                end, said, _ = accepted(listener, limit, 0)
                for member in [member for member, words in missing.items() if words == said]:
                    ends[member] = end
                    del missing[member]
                if end not in ends.values():
                    end.close()
                    if said:  # a peer that died while connecting says nothing; somebody else reports that
                        raise ValueError(f"{what}: a peer says {said.decode(errors='replace')}")
    except BaseException as error:
        for end in ends.values():
            end.close()
        if isinstance(error, TimeoutError):
            peer = min(missing)
            raise PeerTimeout(f"{what}, peer {peer}: nothing for {owner.timeout_s:g} s", peer) from None
        raise
    return ends


class Exchange:
    """Sums over some ranks. The k-th start of each member belongs to sum k."""

    def __init__(self, owner: Owner, members: Sequence[int], name: str, ends: dict[int, socket.socket]) -> None:
        self._owner, self._members, self._name, self._ends = owner, tuple(members), name, ends
        for end in ends.values():
            end.setblocking(False)
        self._started = 0
        self._unsent: dict[int, deque[tuple[bytes, int | None]]] = {member: deque() for member in ends}
        self._read = dict.fromkeys(ends, 0)  # parts that came from each member
        self._parts: dict[int, dict[int, bytearray]] = {member: {} for member in ends}  # not added yet, by sum
        self._sending, self._reading = threading.Lock(), threading.Lock()

    def start(self, tensor: Tensor) -> _Sum:
        """Send a copy of `tensor` to the others; the returned work brings the sum back into it."""
        tensor = tensor.detach()
        part = torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)
        content, fd = _packed(part.view(-1).view(torch.uint8).numpy().data)
        try:
            self._send_kept()
            with self._sending:
                number, self._started = self._started, self._started + 1
                for member, kept in self._unsent.items():
                    if kept or not _sent(self._ends[member], content, fd):
                        kept.append((content, None if fd is None else os.dup(fd)))
        finally:
            if fd is not None:
                os.close(fd)
        return _Sum(self, number, tensor, part)

    def total(self, number: int, part: Tensor) -> Tensor:
        """Wait for the parts of sum `number`, of which `part` is this rank's, and add them in rank order."""
        limit = Limit(self._owner.timeout_s)
        with self._reading:
            for member in self._ends:
                while self._read[member] <= number:
                    self._parts[member][self._read[member]] = self._receive(member, limit)
                    self._read[member] += 1
            for member, kept in self._unsent.items():
                while member in (full := self._send_kept()) and self._started - len(kept) <= number:
                    self._check(member)
                    self._wait(member, False, full, limit)
            parts = {member: self._parts[member].pop(number) for member in self._ends}
        total: Tensor | None = None
        for member in self._members:
            other = part
            if member != self._owner.rank:
                if len(parts[member]) != part.nbytes:
                    raise ValueError(
                        f"{self._name}: rank {member} passes {len(parts[member])} bytes, rank {self._owner.rank} "
                        f"passes {part.nbytes}"
                    )
                other = torch.frombuffer(parts[member], dtype=part.dtype).view(part.shape)
            total = other if total is None else total.add_(other)
        assert total is not None
        return total

    def _receive(self, member: int, limit: Limit) -> bytearray:
        """The next part of a member, whatever sum it belongs to."""
        end = self._ends[member]
        while True:
            self._check(member)
            full = self._send_kept()
            try:
                data, handed, _, _ = socket.recv_fds(end, _BYTES.size + SHORT_BYTES, 1)
            except BlockingIOError:
                self._wait(member, True, full, limit)
            except ConnectionResetError:
                pass  # it closed without having read all of ours; what it sent before is still to come
            else:
                if data:
                    return _unpacked(data, handed)
                self._check(member)
                raise PeerLost(f"{self._name}, peer {member}: the peer closed its end", member)

    def _wait(self, member: int, for_part: bool, full: Sequence[int], limit: Limit) -> None:
        """Until there is room for what is kept for the members `full`, or, should it be awaited, a part of `member`."""
        poll = select.poll()
        for other in {member, *full}:
            arrives = for_part and other == member
            poll.register(self._ends[other], arrives * select.POLLIN | (other in full) * select.POLLOUT)
        if limit.over or not self._owner.waits.keep(partial(poll.poll, limit.left_s * 1e3)):
            raise PeerTimeout(f"{self._name}, peer {member}: nothing for {self._owner.timeout_s:g} s", member)

    def _check(self, member: int) -> None:
        if self._owner.aborted:
            raise PeerLost(f"{self._name}, peer {member}: this rank was aborted", member)

    def _send_kept(self) -> list[int]:
        """Send what there is room for; the members for whom some is still kept."""
        with self._sending:
            for member, kept in self._unsent.items():
                while kept and _sent(self._ends[member], *kept[0]):
                    _, fd = kept.popleft()
                    if fd is not None:
                        os.close(fd)
            return [member for member, kept in self._unsent.items() if kept]

    def shut(self) -> None:
        """Wake whoever waits on any side, from any thread."""
        for end in self._ends.values():
            with contextlib.suppress(OSError):  # the other side has closed
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets to the other members."""
        for member, end in self._ends.items():
            end.close()
            for _, fd in self._unsent[member]:
                if fd is not None:
                    os.close(fd)
            self._unsent[member].clear()


class _Sum:
    """A Work."""

    def __init__(self, exchange: Exchange, number: int, tensor: Tensor, part: Tensor) -> None:
        self._exchange, self._number, self._tensor = exchange, number, tensor
        self._part: Tensor | None = part

    def done(self) -> bool:
        return self._part is None

    def wait(self) -> None:
        if self._part is not None:
            self._tensor.copy_(self._exchange.total(self._number, self._part))
            self._part = None


def _sent(end: socket.socket, content: bytes, fd: int | None) -> bool:
    """Whether there was room. To a peer that is gone there always is: whoever waits for its part is told."""
    try:
        if fd is None:
            end.send(content)
        else:
            socket.send_fds(end, [content], [fd])
    except BlockingIOError:
        return False
    except (BrokenPipeError, ConnectionResetError):
        pass
    return True


def _packed(part: memoryview) -> tuple[bytes, int | None]:
    """A message with the part in it, or one that goes with the descriptor of the memory that the part is in."""
    if len(part) <= SHORT_BYTES:
        return _BYTES.pack(len(part)) + part, None
    with refused(len(part)):
        fd = os.memfd_create("engine-sum", os.MFD_CLOEXEC)
        try:
            left = part
            while left:
                left = left[os.write(fd, left) :]
        except BaseException:
            os.close(fd)
            raise
    return _BYTES.pack(len(part)), fd


def _unpacked(data: bytes, handed: list[int]) -> bytearray:
    """The part of a message. ExhaustedError where the system dropped its descriptor for want of room."""
    (nbytes,) = _BYTES.unpack_from(data)
    if len(data) > _BYTES.size:
        return bytearray(memoryview(data)[_BYTES.size :])
    with refused(nbytes):
        if not handed:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        part = bytearray(nbytes)
        try:
            left = memoryview(part)
            while left and (count := os.preadv(handed[0], [left], nbytes - len(left))):
                left = left[count:]
        finally:
            os.close(handed[0])
    return part
