"""Point-to-point between ranks: one ordered channel per direction and purpose, the same interface for all backends.

    Transport.open([(src, dst, label), ...])      every rank passes the same full list, in the same order
    Channel.isend / irecv -> Work                 k-th send meets k-th receive; neither call blocks
    Work.wait()                                   raises PeerLost or PeerTimeout, naming the channel

A channel carries contiguous tensors whose size both ends know. What the bytes mean is `boundary`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.transport.waits import ANYWHERE, Waits


class Edge(NamedTuple):
    """A directed channel between two world ranks.

    `label` tells channels of one pair apart, e.g. "F" or "ring0".
    """

    src: int
    dst: int
    label: str

    def __str__(self) -> str:
        return f"channel {self.label} from rank {self.src} to rank {self.dst}"


class Endpoint(NamedTuple):
    """What a rank's transport is made of.

    `meeting`: where the ranks find each other, a torch.distributed Store between processes and a ThreadHub between
    threads. `timeout_s` limits connecting and every wait; `waits` says how the rank waits for messages. `in_place`:
    whether `Transport.memory` may be memory that other ranks read.
    """

    rank: int
    world: int
    meeting: Any
    timeout_s: float
    device: torch.device
    waits: Waits = ANYWHERE
    in_place: bool = True


class PeerError(RuntimeError):
    """A wait that could not end because of the other side; never the first cause of a failure.

    `peer` is the world rank of the other side, None where it is not one rank.
    """

    def __init__(self, message: str, peer: int | None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerLost(PeerError):  # noqa: N818
    """The other side closed its end."""


class PeerTimeout(PeerError):  # noqa: N818
    """The other side stayed silent for longer than the time limit."""


class Work(Protocol):
    """An operation under way. It keeps its tensor alive until waited for."""

    def wait(self) -> None:
        """Block until the operation is complete; PeerLost or PeerTimeout where it cannot become so."""

    def done(self) -> bool:
        """Say, without waiting, whether the operation is known to be complete.

        A transport that is not `pollable` says False until `wait` has returned.
        """


class Arrival(Protocol):
    """A message that is to be read where it lies. Those of a channel are waited for and let go in order."""

    def wait(self) -> Tensor:
        """Block until the message is there, and return it: not to be written to, and the receiver's until `free`."""

    def free(self) -> None:
        """Let the sender have its memory back."""


class Channel(Protocol):
    """One end of an edge. `bytes_sent` counts payload bytes of isend.

    `readable`: whether a message can be read where it lies, by `iview`.
    """

    edge: Edge
    bytes_sent: int
    readable: bool

    def isend(self, tensor: Tensor) -> Work:
        """Post a send of a contiguous tensor, which must stay as it is until the work is waited for."""

    def irecv(self, tensor: Tensor) -> Work:
        """Post a receive into a contiguous tensor, which has its message once the work was waited for."""

    def iview(self, like: Tensor) -> Arrival:
        """Post a receive of a message of the size and dtype of `like` without a buffer; where `readable`."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory (uint8) that `isend` may send at less cost than other memory.

        The caller fills it, sends it, and may fill it again once that send is done.
        """


class AnyMemory:
    """Mixin for channels that send all memory at the same cost, and receive into buffers only."""

    readable = False

    def iview(self, like: Tensor) -> Arrival:
        """Refuse: there is nothing to be read in place."""
        raise NotImplementedError("a message of this channel needs a buffer to arrive in")

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return new memory, uint8 [nbytes]."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class PlainMemory:
    """Mixin for transports that send all memory at the same cost."""

    def memory(self, nbytes: int, device: torch.device) -> Tensor:
        """Return new memory, uint8 [nbytes], zeros."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)


class Transport(Protocol):
    """A rank's ends of all channels, and its sums over groups of ranks.

    `device`: where a tensor that nothing else places should live.
    """

    rank: int
    world: int
    device: torch.device

    def open(self, edges: Sequence[Edge]) -> None:
        """Connect this rank's ends, in the order of the list.

        Every rank calls equally often, the k-th time with the same list.
        """

    def channel(self, edge: Edge) -> Channel:
        """Return this rank's end of an edge that was opened."""

    def memory(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory (uint8 [nbytes], zeros) from which any channel sends at the least cost.

        It is the caller's as long as the tensor, or a view of it, exists. A send from it must be waited for before it
        is written to, as every send.
        """

    def all_reduce(self, tensor: Tensor, members: Sequence[int], label: str) -> Work:
        """Sum over `members` (sorted world ranks), in place. Starting it does not block."""

    def open_group(self, members: Sequence[int], label: str, backend: bool = False) -> None:
        """Connect the members of later sums; only they call, all in one order of groups.

        `backend`: the sums may be long and have to be the backend's own, where a transport has another way for short
        ones.
        """

    def check(self) -> None:
        """Raise PeerLost where the run was aborted while this rank waited for nobody; processes are killed instead."""

    def close(self) -> None:
        """Close the transport in order, after the last wait."""

    def abort(self) -> None:
        """End every wait of this rank with PeerLost, from any thread, without waiting for a peer."""
