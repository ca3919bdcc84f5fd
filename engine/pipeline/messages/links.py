"""This rank's messages to and from its neighbours: who is sent what, and when a sent message may be forgotten.

A send is posted and never waited for before computing. Its buffer must live until the transfer is done, and a CPU
backend cannot be asked whether it is. But when the neighbour acknowledges, in the header of a message that travels
the other way, how many of ours it has consumed, those are done for certain:

    rank 0   ──F0──F1──F2──►   rank 1          rank 0 holds F0 F1 F2
    rank 0   ◄──B0 (ack 1)──   rank 1          rank 0 lets go of F0

so memory is O(in flight) and nothing blocks. Where nothing travels back (evaluation), a sender holds at most
`ONE_WAY` messages and then waits for the oldest. Backends that can be asked (NCCL, threads) are. SendBuffers that are
done are used again: what is sent in every step is laid out once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.pipeline.messages.boundary import Header, Layout, ReceiveBuffer, SendBuffer
from engine.transport import Channel, Edge, Transport, Work

ONE_WAY = 2
Key = tuple[int, str]  # pipeline rank of the peer, "F" or "B"


class Pending(NamedTuple):
    """A receive that has been posted."""

    work: Work
    buffer: ReceiveBuffer
    key: Key


class _Outgoing:
    """The sending end of a channel: what is under way, and buffers to use again."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.acknowledged = 0  # messages that the other side has consumed, counted over the whole run
        self._under_way: deque[tuple[Work, SendBuffer]] = deque()
        self._done = 0
        self._spare: dict[Layout, list[SendBuffer]] = {}

    def buffer(self, layout: Layout, device: torch.device) -> SendBuffer:
        spare = self._spare.get(layout)
        return spare.pop() if spare else SendBuffer(layout, self.channel.empty(layout.nbytes, device))

    def send(self, buffer: SendBuffer) -> None:
        self._under_way.append((self.channel.isend(buffer.memory), buffer))

    def tidy(self) -> None:
        """Take back the buffers of sends that are known to be done."""
        while self._under_way and (self._done < self.acknowledged or self._under_way[0][0].done()):
            self._finish()

    def limit(self, most: int) -> None:
        while len(self._under_way) > most:
            self._finish()

    def _finish(self) -> None:
        work, buffer = self._under_way.popleft()
        work.wait()
        self._done += 1
        self._spare.setdefault(buffer.layout, []).append(buffer)

    def __len__(self) -> int:
        return len(self._under_way)


class Links:
    """Messages between the ranks of one replica.

    `base` is the world rank of its pipeline rank 0; `label` begins the labels of its channels.
    """

    def __init__(self, transport: Transport, base: int, device: torch.device, label: str = "") -> None:
        self._transport, self._label = transport, label
        self._base = base
        self._device = device
        self._outgoing: dict[Key, _Outgoing] = {}
        self._incoming: dict[Key, Channel] = {}
        self._consumed: dict[Key, int] = {}
        self.bytes_sent = 0

    def check(self) -> None:
        """Raise PeerLost where the run was aborted."""
        self._transport.check()

    def post(self, peer: int, kind: str, layout: Layout) -> Pending:
        """Post the receive of the next message of `kind` ("F", "B") from pipeline rank `peer`."""
        key = peer, kind
        if key not in self._incoming:
            self._incoming[key] = self._transport.channel(
                Edge(self._base + peer, self._transport.rank, self._label + kind)
            )
            self._consumed[key] = 0
        buffer = ReceiveBuffer(layout, torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device))
        pending = Pending(self._incoming[key].irecv(buffer.memory), buffer, key)
        if (peer, _OPPOSITE[kind]) in self._outgoing:
            self._outgoing[peer, _OPPOSITE[kind]].tidy()
        return pending

    def receive(self, pending: Pending, stage: int, microbatch: int) -> list[Tensor | None]:
        """Wait for a posted receive; its tensors. RuntimeError where it is not the message of (stage, microbatch)."""
        pending.work.wait()
        peer, kind = pending.key
        try:
            tensors, acknowledged = pending.buffer.open(stage, microbatch)
        except RuntimeError as error:
            raise RuntimeError(f"message {kind} from rank {peer} of the pipeline is out of step: {error}") from None
        self._consumed[pending.key] += 1
        if acknowledged:
            self._outgoing[peer, _OPPOSITE[kind]].acknowledged = acknowledged
        return tensors

    def send(
        self, peer: int, kind: str, layout: Layout, tensors: Sequence[Tensor | None], stage: int, microbatch: int
    ) -> None:
        """Post the send of a message; returns without waiting for it."""
        key = peer, kind
        if key not in self._outgoing:
            edge = Edge(self._transport.rank, self._base + peer, self._label + kind)
            self._outgoing[key] = _Outgoing(self._transport.channel(edge))
        outgoing = self._outgoing[key]
        buffer = outgoing.buffer(layout, self._device)
        buffer.fill(tensors, Header(stage, microbatch, self._consumed.get((peer, _OPPOSITE[kind]), 0)))
        outgoing.send(buffer)  # it is on its way, everything else can wait until then
        outgoing.tidy()
        self.bytes_sent += layout.nbytes

    def limit(self, most: int) -> None:
        """Wait for the oldest sends until no channel has more than `most` under way. 0: all are done."""
        for outgoing in self._outgoing.values():
            outgoing.limit(most)

    @property
    def outstanding(self) -> int:
        """Messages held because their transfer is not known to be done."""
        return sum(map(len, self._outgoing.values()))


_OPPOSITE = {"F": "B", "B": "F"}  # the channel on which the other side acknowledges
