"""The optimizer's work divided over members: each keeps the state only of what it updates (see `division`).

    a bucket of N shards      [ head | shard 0 | shard 1 | ... | shard N-1 ]     once for gradients, once for parameters

    REDUCE       combine          a member gets the sum of the gradients that it owns
    STEP         the optimizer    updates the parameters that it owns, in place
    GATHER       spread           everybody gets all parameters; waited for by the stage's next forward

What the optimizer is given are pieces: parameters that this member owns, or the flat part of one that lies in its
shard. An update that treats every element by itself gives each the number that it would have without shards.

The parameters lie in one buffer per bucket, as the gradients do, so that nothing is copied to spread them.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.collectives.background import ReduceThread
from engine.collectives.buckets import Reducer
from engine.collectives.division import Division
from engine.collectives.group import Group
from engine.collectives.layout import Bucket, Named
from engine.collectives.order import Order


class Piece(NamedTuple):
    """The part of parameter `number` (of the reducer's `named`) that this member updates."""

    number: int
    parameter: nn.Parameter


class ShardedReducer(Reducer):
    """A reducer after which each member has the gradients of its `pieces`, and no other; then `gather` and `gathered`.

    `group` leaves out the comparison of calls: the layout is compared once. The parameters are moved into buffers of
    the reducer's.
    """

    def __init__(
        self,
        params: list[Named],
        group: Group,
        bucket_bytes: int,
        thread: ReduceThread,
        order: Order,
        kind: type[Division],
    ) -> None:
        self._division = kind(group)
        super().__init__(params, group.collective, bucket_bytes, thread, order, self._division)
        self._values = [torch.zeros_like(flat) for flat in self._flats]
        numbers = {id(p): number for number, (_, p) in enumerate(self.named)}
        self._pieces = [
            self._take(*each, numbers) for each in zip(self.buckets, self._flats, self._values, strict=True)
        ]
        self._gathering: list[Future[None]] = []
        self.gather_span = (0, 0)  # time.monotonic_ns at the start and the end of the last gathering

    @property
    def pieces(self) -> list[Piece]:
        """What the optimizer updates, in the order of the parameters."""
        return sorted((piece for bucket in self._pieces for _, piece, _ in bucket), key=lambda piece: piece.number)

    def _take(
        self, bucket: Bucket, grads: Tensor, values: Tensor, numbers: dict[int, int]
    ) -> list[tuple[int, Piece, Tensor]]:
        """Move a bucket's parameters into `values`; of what this member owns (place in the bucket, piece, gradient)."""
        first, last = (bucket.head + end for end in self._division.own(bucket.elements - bucket.head))
        whole = bucket.views(grads)
        found = []
        for place, ((_, parameter), view) in enumerate(zip(bucket.named, bucket.views(values), strict=True)):
            view.copy_(parameter.detach())
            parameter.data = view
            offset = bucket.offsets[place]
            begin, end = max(first, offset), min(last, offset + parameter.numel())
            if end - begin == parameter.numel() and not self._division.elementwise:
                found.append((place, Piece(numbers[id(parameter)], nn.Parameter(view)), whole[place]))
            elif begin < end:
                piece = Piece(numbers[id(parameter)], nn.Parameter(values[begin:end]))
                found.append((place, piece, grads[begin:end]))
        return found

    def _hand_back(self, number: int) -> None:
        bucket, flat = self.buckets[number], self._flats[number]
        anywhere = flat[: len(bucket.named)].tolist()
        for place, piece, grad in self._pieces[number]:
            piece.parameter.grad = grad if anywhere[place] else None
        for _, parameter in bucket.named:
            parameter.grad = None

    def gather(self) -> None:
        """Start to exchange the updated shards; returns at once."""
        stream = None if self._stream is None else torch.cuda.current_stream(self._stream.device)
        ready = None if stream is None else stream.record_event()
        self._gathering = [self._thread.start(lambda: self._gather(ready))]

    def gathered(self) -> bool:
        """Block until the parameters are whole again; whether there was anything to wait for."""
        waited = bool(self._gathering)
        for future in self._gathering:
            future.result()
        self._gathering = []
        return waited

    def _gather(self, ready: torch.cuda.Event | None) -> None:
        start = time.monotonic_ns()
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            for bucket, values in zip(self.buckets, self._values, strict=True):
                self._division.spread(values[bucket.head :])
            if self._stream is not None:
                self._stream.synchronize()
        self.gather_span = (start, time.monotonic_ns())
