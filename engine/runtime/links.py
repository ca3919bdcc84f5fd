"""This rank's messages to and from its neighbours: who is sent what, and when a sent message may be forgotten.

A send is posted and never waited for before computing. Its buffer must live until the transfer is done, and a CPU
backend cannot be asked whether it is. But when the neighbour acknowledges, in the header of a message that travels
the other way, how many of ours it has consumed, those are done for certain:

    rank 0   ──F0──F1──F2──►   rank 1          rank 0 holds F0 F1 F2
    rank 0   ◄──B0 (ack 1)──   rank 1          rank 0 lets go of F0

so memory is O(in flight) and nothing blocks. Where nothing travels back (evaluation), a sender holds at most
`ONE_WAY` messages and then waits for the oldest. On a GPU a finished send says so itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.runtime.boundary import Header, Layout
from engine.runtime.transport import Channel, Edge, Transport, Work

ONE_WAY = 2


class Pending(NamedTuple):
    """A receive that has been posted."""

    work: Work
    buffer: Tensor
    layout: Layout
    edge: Edge


class Links:
    """Messages between the ranks of one replica. `base` is the world rank of its pipeline rank 0."""

    def __init__(self, transport: Transport, base: int, device: torch.device) -> None:
        self._transport = transport
        self._base = base
        self._me = transport.rank
        self._device = device
        self._sent: dict[Edge, deque[Work]] = {}
        self._released: dict[Edge, int] = {}
        self._consumed: dict[Edge, int] = {}
        self.bytes_sent = 0

    def post(self, peer: int, kind: str, layout: Layout) -> Pending:
        """Post the receive of the next message of `kind` ("F", "B") from pipeline rank `peer`."""
        edge = Edge(self._base + peer, self._me, kind)
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
        return Pending(self._channel(edge).irecv(buffer), buffer, layout, edge)

    def receive(self, pending: Pending, stage: int, microbatch: int) -> list[Tensor | None]:
        """Wait for a posted receive; its tensors. RuntimeError where it is not the message of (stage, microbatch)."""
        pending.work.wait()
        try:
            tensors, acknowledged = pending.layout.unpack(pending.buffer, Header(stage, microbatch, 0))
        except RuntimeError as error:
            raise RuntimeError(f"message {pending.edge} out of step: {error}") from None
        self._consumed[pending.edge] = self._consumed.get(pending.edge, 0) + 1
        self._release(_opposite(pending.edge), acknowledged)
        return tensors

    def send(
        self, peer: int, kind: str, layout: Layout, tensors: Sequence[Tensor | None], stage: int, microbatch: int
    ) -> None:
        """Post the send of a message; returns without waiting for it."""
        edge = Edge(self._me, self._base + peer, kind)
        header = Header(stage, microbatch, self._consumed.get(_opposite(edge), 0))
        buffer = layout.pack(tensors, header, self._device)
        self._sent.setdefault(edge, deque()).append(self._channel(edge).isend(buffer))
        self.bytes_sent += layout.nbytes

    def limit(self, most: int) -> None:
        """Wait for the oldest sends until no channel has more than `most` under way. 0: all are done."""
        for edge, works in self._sent.items():
            while len(works) > most:
                works.popleft().wait()
                self._released[edge] = self._released.get(edge, 0) + 1

    @property
    def outstanding(self) -> int:
        """Messages held because their transfer is not known to be done."""
        return sum(map(len, self._sent.values()))

    def _release(self, edge: Edge, acknowledged: int) -> None:
        works = self._sent.get(edge)
        done = self._released.get(edge, 0)
        while works and done < acknowledged:
            works.popleft().wait()
            done += 1
        self._released[edge] = done

    def _channel(self, edge: Edge) -> Channel:
        return self._transport.channel(edge)


def _opposite(edge: Edge) -> Edge:
    """The channel on which the other side acknowledges."""
    return Edge(edge.dst, edge.src, "B" if edge.label == "F" else "F")
