"""How the ranks of one host get their job from rank 0: over a Unix socket on which the kernel vouches for both sides.

    rank 0   listens, and puts the socket's name into the launcher's store
    rank r   connects, looks whose socket it is, then reads what rank 0 hands out; rank 0 has looked who asks

A launcher's store listens on the network and takes anybody's word, so what decides which code runs does not go through
it. Each connection stays open: its end is the end of that rank's process, however it ended. With the answer comes
shared memory in which every rank keeps its position (`position.py`), readable after it was killed.
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
from collections.abc import Callable

from engine.telemetry import position
from engine.transport.credentials import check_ours, is_ours

_RANK = struct.Struct("=q")
_LENGTH = struct.Struct("=q")
_GREET_S = 60.0  # for a process of ours to say which rank it is
POSITION_BYTES = 8


def available() -> bool:
    """Whether this system has what it is made of."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class Counter:
    """Rank 0's side. `positions`: an int64 for each rank."""

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

    def open(self, content: bytes, gone: Callable[[int], None]) -> None:
        """From now on hand out `content`. `gone(rank)`: called in a thread when a rank's process has ended."""
        threading.Thread(target=self._serve, args=(content, gone), name="delivery", daemon=True).start()

    def _serve(self, content: bytes, gone: Callable[[int], None]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        with contextlib.suppress(OSError):  # whoever goes in the middle comes to nobody's harm
                            end, rank = self._hand_out(content)
                            selector.register(end, selectors.EVENT_READ, rank)
                    elif _ended(key.fileobj):  # nothing is said on it: it can be read when it has ended
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
    """What rank 0 hands out at the socket `name`, the ranks' positions, and the connection, whose end is rank 0's.

    StrangerError where it is another user's socket; OSError where nobody is there.
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


def mapped(memory: int) -> memoryview:
    """The shared positions as int64s."""
    return memoryview(mmap.mmap(memory, os.fstat(memory).st_size)).cast("q")


def _read(end: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = end.recv(min(length - len(parts), 2**20))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        parts += part
    return bytes(parts)


def _ended(end: object) -> bool:
    assert isinstance(end, socket.socket)
    try:
        return not end.recv(1)
    except OSError:
        return True
