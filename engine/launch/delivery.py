"""The job's way from rank 0 to the ranks of one host, and their records' way back: a Unix socket on which the kernel
vouches for both sides.

    rank 0   listens, and puts the socket's name into the launcher's store
    rank r   connects, looks whose socket it is, then reads what rank 0 hands out; rank 0 has looked who asks
             from then on sends its records, each behind its length

A launcher's store listens on the network and takes anybody's word, so neither what decides which code runs nor what a
run reports goes through it. Each connection stays open: its end is the end of that rank's process, however it ended.
With the answer comes shared memory in which every rank keeps its position (`position.py`), readable after it was
killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator

from engine.telemetry import position
from engine.transport.credentials import check_ours, is_ours

_RANK = struct.Struct("=q")
_LENGTH = struct.Struct("=q")
_GREET_S = 60.0  # for a process of ours to say which rank it is
POSITION_BYTES = 8


def available() -> bool:
    """Say whether this system has what the delivery is made of: Linux with memfd_create."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class Counter:
    """Rank 0's side of the delivery. `positions`: an int64 for each rank, in shared memory."""

    def __init__(self, world: int) -> None:
        self._memory = os.memfd_create("engine-positions", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, POSITION_BYTES * world)
        self.positions = mapped(self._memory)
        for rank in range(world):
            self.positions[rank] = position.NOWHERE
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = f"engine-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(world)

    def open(self, content: bytes, heard: Callable[[bytes], None], gone: Callable[[int], None]) -> None:
        """Hand out `content` from now on, in a thread.

        In that thread `heard(record)` is called for each record of a rank, in its order, then `gone(rank)` when its
        process has ended.
        """
        threading.Thread(target=self._serve, args=(content, heard, gone), name="delivery", daemon=True).start()

    def _serve(self, content: bytes, heard: Callable[[bytes], None], gone: Callable[[int], None]) -> None:
        arrived: dict[int, bytearray] = {}  # by rank: what has come of its next records
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        with contextlib.suppress(OSError):  # whoever goes in the middle comes to nobody's harm
                            end, rank = self._hand_out(content)
                            selector.register(end, selectors.EVENT_READ, rank)
                            arrived[rank] = bytearray()
                    elif part := _said(key.fileobj):
                        arrived[key.data] += part
                        for record in _whole(arrived[key.data]):
                            heard(record)
                    else:
                        selector.unregister(key.fileobj)
                        gone(key.data)

    def _hand_out(self, content: bytes) -> tuple[socket.socket, int]:
        end, _ = self._listener.accept()
        try:
            if not is_ours(end):
                raise PermissionError("another user's process")
            end.settimeout(_GREET_S)
            (rank,) = _RANK.unpack(_read(end, _RANK.size))
            socket.send_fds(end, [_LENGTH.pack(len(content))], [self._memory])
            end.sendall(content)
            end.settimeout(None)
        except BaseException:
            end.close()
            raise
        return end, rank


def fetch(name: str, rank: int) -> tuple[bytes, memoryview, socket.socket]:
    """Fetch what rank 0 hands out at the socket `name`.

    Returns the content, the ranks' positions, and the connection, whose end is rank 0's. StrangerError where it is
    another user's socket; OSError where nobody is there.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(f"\0{name}")
        check_ours(end, f"rank {rank} asking rank 0 for the job")
        end.sendall(_RANK.pack(rank))
        start, (memory,), _, _ = socket.recv_fds(end, _LENGTH.size, 1)
        (length,) = _LENGTH.unpack(start + _read(end, _LENGTH.size - len(start)))
        try:
            return _read(end, length), mapped(memory), end
        finally:
            os.close(memory)
    except BaseException:
        end.close()
        raise


class Mail:
    """A rank's way to send records to rank 0.

    They go through `otherwise` until the connection is there, then over that.
    """

    def __init__(self, otherwise: Callable[[bytes], None]) -> None:
        self._otherwise = otherwise
        self._end: socket.socket | None = None
        self._lock = threading.Lock()  # the rank's threads log

    def use(self, end: socket.socket) -> None:
        """Send records over this connection from now on."""
        self._end = end

    def post(self, record: bytes) -> None:
        """Send a record to rank 0; OSError where rank 0 is gone."""
        if self._end is None:
            self._otherwise(record)
            return
        with self._lock:
            self._end.sendall(_LENGTH.pack(len(record)) + record)


def mapped(memory: int) -> memoryview:
    """Map the shared positions as int64s."""
    return memoryview(mmap.mmap(memory, os.fstat(memory).st_size)).cast("q")


def _read(end: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = end.recv(min(length - len(parts), 2**20))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        parts += part
    return bytes(parts)


def _said(end: object) -> bytes:
    """What a connection that can be read has to say; nothing where it has ended."""
    assert isinstance(end, socket.socket)
    try:
        return end.recv(2**20)
    except OSError:
        return b""


def _whole(arrived: bytearray) -> Iterator[bytes]:
    """The records that are complete, taken off the beginning."""
    while len(arrived) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(arrived)
        if len(arrived) < _LENGTH.size + length:
            return
        yield bytes(arrived[_LENGTH.size : _LENGTH.size + length])
        del arrived[: _LENGTH.size + length]
