"""Unix sockets over which processes of one user and one host meet: named at random, the names in the ranks' store.

A name lies in no file system, so nobody need remove it. Both sides see to it that the other is a process of the same
user (`credentials.py`).
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from engine.transport import PeerLost, PeerTimeout
from engine.transport.credentials import StrangerError, check_ours, is_ours


class Limit:
    """A time limit that has begun."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds left, never zero: to a socket that means that it must not wait at all."""
        return max(0.001, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() > self._end


@contextmanager
def listening(store: Store, key: str, most: int) -> Iterator[socket.socket]:
    """Open a socket that `most` may connect to before it accepts one, and publish its name under `key`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"engine-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(max(1, most))
        store.set(key, name)
        yield listener


def connected(store: Store, key: str, limit: Limit, what: str, peer: int, says: bytes = b"") -> socket.socket:
    """Connect to the socket whose name the store holds under `key`.

    `what` and `peer` go into PeerTimeout and PeerLost. `says`: what is sent first, if anything, once the listener is
    known to be of this user.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        store.wait([key], timedelta(seconds=limit.left_s))
        end.connect("\0" + store.get(key).decode())
        check_ours(end, f"{what}, peer {peer}")
        if says:
            end.send(says)
    except StrangerError:
        end.close()
        raise
    except (RuntimeError, OSError) as error:
        end.close()
        if "timeout" in str(error).lower():
            raise PeerTimeout(f"{what}, peer {peer}: nothing for {limit.limit_s:g} s", peer) from None
        raise PeerLost(f"{what}, peer {peer}: {error}", peer) from None
    return end


def accepted(listener: socket.socket, limit: Limit, files: int) -> tuple[socket.socket, bytes, list[int]]:
    """Accept the next process of this user: its socket, its first message, and the descriptors it hands over.

    TimeoutError where none comes.
    """
    while True:
        listener.settimeout(limit.left_s)
        end, _ = listener.accept()
        end.settimeout(limit.left_s)
        if is_ours(end):
            data, handed, _, _ = socket.recv_fds(end, 4096, files)
            end.settimeout(None)
            return end, data, handed
        end.close()
