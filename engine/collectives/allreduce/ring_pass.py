"""Once around a ring: the reduce-scatter and the all-gather that ring, double_ring and hierarchical are made of.

The tensor is cut into N chunks. In step s = 0 .. 2N-3 the member at place k sends chunk k-s to its successor and
receives chunk k-1-s from its predecessor (all modulo N), so what arrives in one step leaves in the next:

    N = 3       s = 0     s = 1    │  s = 2     s = 3
    place 0   sends 0       2      │    1         0
               gets 2 +     1 +    │    0 =       2 =         + add own to it      = final, keep
              reduce-scatter       │  all-gather

After the reduce-scatter place k owns chunk k+1. Chunk j is the sum x_j + x_(j+1) + ... + x_(j+N-1), folded from the
left, and every member gets a copy of it: bitwise the same everywhere and in every run. Every member sends each chunk
twice, but for one chunk in each half: 2(N-1)/N of the tensor.

A chunk travels in pieces, so that one is added while the next is on the wire. The receives of a step are posted
before the step that precedes it: no message waits for its buffer. The all-gather may be received straight into the
tensor, although this rank's own sends of that memory are not waited for: a final chunk can only exist once our part
of it has been delivered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from engine.collectives.ops import ReduceOp, combine_means
from engine.collectives.peers import Peers, message_pieces, wait_all
from engine.transport import Arrival


class RingPass:
    """One member's way around a ring of positions.

    The `order` is that of travel; `name` tells the buffers of several passes apart.
    """

    def __init__(self, peers: Peers, order: Sequence[int], name: str = "ring") -> None:
        self.size, self.place = len(order), order.index(peers.position)
        self._before, self._after = order[self.place - 1], order[(self.place + 1) % self.size]
        self._peers, self._name = peers, name

    @staticmethod
    def pairs(order: Sequence[int]) -> list[tuple[int, int]]:
        """Return who sends to whom; nothing where there is one member."""
        return list(zip(order, [*order[1:], order[0]], strict=True)) if len(order) > 1 else []

    @property
    def reduce_scatter(self) -> range:
        """Steps after which `own` of the tensor is reduced."""
        return range(self.size - 1)

    @property
    def all_gather(self) -> range:
        """Steps that bring everybody's own chunk to everybody."""
        return range(self.size - 1, 2 * self.size - 2)

    @property
    def all_reduce(self) -> range:
        """Steps of both halves."""
        return range(2 * self.size - 2)

    def own(self, tensor: Tensor) -> Tensor:
        """Return the chunk that this place owns between the two halves: a view."""
        return tensor.tensor_split(self.size)[(self.place + 1) % self.size]

    def turn(self, tensor: Tensor, op: ReduceOp, steps: range, counts: Sequence[int] | None = None) -> Iterator[None]:
        """Go through `steps`; yields before each wait, so that several passes can turn at once.

        With `counts`, by place, each part is the mean of so many, and so is whatever they become on the way.
        """
        if not steps:
            return
        chunks = [message_pieces(chunk) for chunk in tensor.tensor_split(self.size)]

        def post(step: int) -> list[tuple[Tensor, Arrival]]:
            """Receives of a step: pieces of the tensor, and what arrives to be added to each, or in its place."""
            cut = chunks[(self.place - 1 - step) % self.size]
            if step < self.size - 1:
                arriving = self._peers.operands(self._before, cut, (self._name, step % 2))
            else:
                arriving = self._peers.into(self._before, cut)
            return list(zip(cut, arriving, strict=True))

        following = post(steps.start)
        sent = [self._peers.send(self._after, piece) for piece in chunks[(self.place - steps.start) % self.size]]
        for step in steps:
            arriving, following = following, post(step + 1) if step + 1 in steps else []
            first = self.place - 1 - step  # of the places whose parts arrive, this one's predecessor is the last
            before = sum(counts[place % self.size] for place in range(first, self.place)) if counts else 0
            yield
            for piece, arrival in arriving:
                part = arrival.wait()
                if part is not piece and counts:
                    combine_means(part, piece, before, counts[self.place], out=piece)
                elif part is not piece:
                    op.combine(part, piece, out=piece)
                arrival.free()
                if step + 1 in steps:
                    sent.append(self._peers.send(self._after, piece))
        wait_all(sent)


def run(*turns: Iterator[None]) -> None:
    """Run passes at once: a step of each in turn, until all are done."""
    left = list(turns)
    while left:
        left = [turn for turn in left if next(turn, turn) is not turn]
