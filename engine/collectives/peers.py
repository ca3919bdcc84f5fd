"""A member's ends of the channels to the others, by position; counts what it sends, and keeps buffers to receive in.

Messages are cut into pieces, so that one is combined or passed on while the next is on the wire. Both ends cut alike,
because the size of a piece follows from the tensor alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.transport import Arrival, Channel, Edge, Transport, Work

PIECE_BYTES = 2**20  # smaller ones cost more in wake-ups than their overlap wins on loopback


@dataclass
class Sent:
    """Bytes and messages that left a rank so far; an empty tensor is no message."""

    nbytes: int = 0
    messages: int = 0


class Peers:
    """A member's ends of the channels to the other members, by position.

    `members`: world ranks; a position is an index into them. `label` tells groups over the same ranks apart.
    """

    def __init__(self, transport: Transport, members: Sequence[int], label: str, sent: Sent | None = None) -> None:
        self.transport, self.members, self.label = transport, tuple(members), label
        self.size, self.position = len(self.members), self.members.index(transport.rank)
        self.sent = sent or Sent()
        self._to: dict[int, Channel] = {}
        self._from: dict[int, Channel] = {}
        self._scratch: dict[Hashable, Tensor] = {}

    def send(self, to: int, tensor: Tensor) -> Work:
        """Post a send to a position; `tensor` must stay as it is until the work is waited for."""
        if to not in self._to:
            self._to[to] = self.transport.channel(Edge(self.members[self.position], self.members[to], self.label))
        self.sent.nbytes += tensor.nbytes
        self.sent.messages += tensor.nbytes > 0
        return self._to[to].isend(tensor)

    def recv(self, source: int, tensor: Tensor) -> Work:
        """Post a receive from a position. The earlier it is posted, the cheaper its message travels."""
        return self._source(source).irecv(tensor)

    def _source(self, source: int) -> Channel:
        if source not in self._from:
            edge = Edge(self.members[source], self.members[self.position], self.label)
            self._from[source] = self.transport.channel(edge)
        return self._from[source]

    def operands(self, source: int, cut: Sequence[Tensor], slot: Hashable) -> list[Arrival]:
        """Post receives of messages of the sizes of `cut`, one for each, to be read once and let go in order.

        They are read where the sender has them, where that can be; else they arrive in the scratch buffer `slot`.
        """
        if not cut:
            return []
        channel = self._source(source)
        if channel.readable:
            return [channel.iview(piece) for piece in cut]
        return self.into(source, views_like(cut, self.scratch(slot, cut[0], sum(map(len, cut)))))

    def into(self, source: int, buffers: Sequence[Tensor]) -> list[Arrival]:
        """Post receives into buffers; an arrival is its buffer."""
        return [_Received(buffer, self.recv(source, buffer)) for buffer in buffers]

    def memory(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor [elements], zeros, from which messages are sent at the least cost."""
        return self.transport.memory(elements * dtype.itemsize, device).view(dtype)

    def labelled(self, label: str) -> Peers:
        """Return the same members over other channels, counted together with these."""
        return Peers(self.transport, self.members, label, self.sent)

    def scratch(self, slot: Hashable, like: Tensor, elements: int) -> Tensor:
        """Return a buffer [elements] of the dtype and device of `like`; what `slot` held before is lost."""
        nbytes = -(-elements * like.element_size() // 64) * 64
        kept = self._scratch.get(slot)
        if kept is None or len(kept) < nbytes or kept.device != like.device:
            kept = self._scratch[slot] = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return kept[:nbytes].view(like.dtype)[:elements]


class _Received:
    """A message in a buffer of the receiver's: an `Arrival`."""

    def __init__(self, buffer: Tensor, work: Work) -> None:
        self._buffer, self._work = buffer, work

    def wait(self) -> Tensor:
        self._work.wait()
        return self._buffer

    def free(self) -> None:
        """There is nothing to give back."""


def mesh(members: Sequence[int], pairs: Iterable[tuple[int, int]], label: str) -> list[Edge]:
    """Return the edges of directed pairs of positions, each once, in the order given."""
    return [Edge(members[a], members[b], label) for a, b in dict.fromkeys(pairs)]


def message_pieces(tensor: Tensor) -> list[Tensor]:
    """Cut a flat tensor into pieces of at most PIECE_BYTES; none of an empty one."""
    if not len(tensor):
        return []
    size = max(1, PIECE_BYTES // tensor.element_size())
    return [tensor] if len(tensor) <= size else list(tensor.split(size))


def views_like(cut: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """Return views of `buffer`, one behind the other, of the sizes of `cut`."""
    sizes = [len(piece) for piece in cut]
    return list(buffer[: sum(sizes)].split(sizes)) if sizes else []


def wait_all(works: Iterable[Work]) -> None:
    """Wait for all works, in order."""
    for work in works:
        work.wait()
