"""Whose process is at the other end of a Unix socket: the kernel says (Linux).

The names of sockets are found through a store, and into a launcher's any process of the host can write. So both sides
ask: who accepts lets only processes of its own user in, and who connects says nothing to a socket that another user
listens on.
"""

from __future__ import annotations

import os
import socket
import struct

_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group


class StrangerError(RuntimeError):
    """Another user's process answered in the place of one of the run's own."""


def user_of(end: socket.socket) -> int:
    """Return the user id of the process that connected, or that listened when `end` connected to it."""
    _, user, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user)


def is_ours(end: socket.socket) -> bool:
    """Say whether the process at the other end belongs to this process's user."""
    return user_of(end) == os.geteuid()


def check_ours(end: socket.socket, what: str) -> None:
    """Raise StrangerError unless this process's own user listens at the other end."""
    if not is_ours(end):
        raise StrangerError(
            f"{what}: user {user_of(end)} listens there, not user {os.geteuid()} of this run: somebody else on this "
            "host wrote into the store that the ranks meet at; start again, and tell who looks after the host"
        )
