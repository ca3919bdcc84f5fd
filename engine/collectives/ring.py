"""Ring all-reduce: reduce-scatter, then all-gather, N-1 steps each (Patarasuk & Yuan 2009, JPDC 69(2)).

The tensor is cut into N chunks. In step s = 0 .. 2N-3 the member at position k sends chunk k-s to its successor and
receives chunk k-1-s from its predecessor (all modulo N), so what arrives in one step leaves in the next:

    N = 3          s = 0     s = 1    │  s = 2     s = 3
    position 0   sends 0       2      │    1         0
                  gets 2 +     1 +    │    0 =       2 =         + add own to it      = final, keep
                 reduce-scatter       │  all-gather

After the reduce-scatter position k owns chunk k+1. Chunk j is the sum x_j + x_(j+1) + ... + x_(j+N-1), folded from the
left, and every member gets a copy of it: bitwise the same everywhere and in every run. Every member sends each chunk
twice, but for one chunk in each half: 2(N-1)/N of the tensor.

A chunk travels in pieces, so that one is added while the next is on the wire. The receives of a step are posted
before the step that precedes it: no message waits for its buffer. The all-gather may be received straight into the
tensor, although this rank's own sends of that memory are not waited for: a final chunk can only exist once our part
of it has been delivered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.collectives.base import Collective
from engine.runtime.transport import Edge, Transport, Work

PIECE_BYTES = 2**20  # smaller ones cost more in wake-ups than their overlap wins on loopback


class Ring(Collective):
    """Adds half precision in fp32 and rounds to the wire's dtype at each hop; integers wrap around."""

    def __init__(self, transport: Transport, members: Sequence[int], label: str) -> None:
        super().__init__(transport, members, label)
        if len(self.members) > 1:
            before, after = self.members[self.position - 1], self.members[(self.position + 1) % len(self.members)]
            self._from = transport.channel(Edge(before, transport.rank, label))
            self._to = transport.channel(Edge(transport.rank, after, label))
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        if len(members) == 1:
            return []
        return [Edge(src, dst, label) for src, dst in zip(members, [*members[1:], members[0]], strict=True)]

    def _sum(self, tensor: Tensor) -> None:
        size, last_step = len(self.members), 2 * len(self.members) - 3
        chunks = [_pieces(chunk) for chunk in tensor.tensor_split(size)]
        scratch = self._halves(tensor, len(tensor) // size + 1)
        sent: list[Work] = []

        def post(step: int) -> list[tuple[Tensor, Tensor, Work]]:
            """Receives of a step: (piece of the tensor, where it arrives, work)."""
            pieces = chunks[(self.position - 1 - step) % size]
            adding = step < size - 1
            buffers = _alike(pieces, scratch[step % 2]) if adding else pieces
            return [(p, b, self._from.irecv(b)) for p, b in zip(pieces, buffers, strict=True)]

        following = post(0)
        sent += [self._send(piece) for piece in chunks[self.position]]
        for step in range(last_step + 1):
            arriving, following = following, post(step + 1) if step < last_step else []
            for piece, buffer, work in arriving:
                work.wait()
                if buffer is not piece:
                    piece.add_(buffer)
                if step < last_step:
                    sent.append(self._send(piece))
        for work in sent:
            work.wait()

    def _send(self, piece: Tensor) -> Work:
        self.bytes_sent += piece.nbytes
        return self._to.isend(piece)

    def _halves(self, like: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Two buffers of at least `elements`, used by odd and even steps; kept from call to call."""
        nbytes = -(-elements * like.element_size() // 64) * 64
        if len(self._scratch) < 2 * nbytes or self._scratch.device != like.device:
            self._scratch = torch.empty(2 * nbytes, dtype=torch.uint8, device=like.device)
        first, second = self._scratch[:nbytes], self._scratch[nbytes : 2 * nbytes]
        return first.view(like.dtype), second.view(like.dtype)


def _pieces(chunk: Tensor) -> list[Tensor]:
    """Cut a chunk into pieces of at most PIECE_BYTES; none for an empty chunk."""
    return list(chunk.split(max(1, PIECE_BYTES // chunk.element_size()))) if len(chunk) else []


def _alike(pieces: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """Views of `buffer` of the sizes of `pieces`."""
    sizes = [len(piece) for piece in pieces]
    return list(buffer[: sum(sizes)].split(sizes)) if sizes else []
