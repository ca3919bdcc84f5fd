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

import torch
from torch import Tensor

from engine.collectives.primitives.group import Group
from engine.gradients.background import ReduceThread
from engine.gradients.buckets import Reducer
from engine.gradients.division import Division
from engine.gradients.layout import Bucket, Named
from engine.gradients.order import Order
from engine.gradients.shard_parameters import Owned, ShardParameter, move_into, owned


class ShardedReducer(Reducer):
    """A reducer after which each member has the gradients of its `pieces` only; then `gather` and `gathered`.

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
        self._pieces = [self._take(*each, numbers) for each in zip(self.buckets, self._values, strict=True)]
        self._gathering: list[Future[None]] = []
        self.gather_span = (0, 0)  # time.monotonic_ns at the start and the end of the last gathering

    @property
    def pieces(self) -> list[ShardParameter]:
        """Parameters that the optimizer updates, in the order of the parameters."""
        return sorted((own.piece for bucket in self._pieces for own in bucket), key=lambda piece: piece.number)

    def _take(self, bucket: Bucket, values: Tensor, numbers: dict[int, int]) -> list[Owned]:
        """Move a bucket's parameters into `values`; what of them this member owns."""
        move_into(bucket, values)
        span = self._division.span(bucket)
        return owned(bucket, span, values[slice(*span)], numbers, self._division.elementwise)

    def _hand_back(self, number: int) -> None:
        bucket, flat = self.buckets[number], self._flats[number]
        anywhere, part = flat[: len(bucket.named)].tolist(), flat[slice(*self._division.span(bucket))]
        for own in self._pieces[number]:
            own.piece.parameter.grad = own.gradient(part) if anywhere[own.place] else None
        for _, parameter in bucket.named:
            parameter.grad = None

    def gather(self) -> None:
        """Start to exchange the updated shards; return at once."""
        stream = None if self._stream is None else torch.cuda.current_stream(self._stream.device)
        ready = None if stream is None else stream.record_event()
        self._gathering = [self._thread.start(lambda: self._gather(ready))]

    def gathered(self) -> bool:
        """Block until the parameters are whole again; say whether there was anything to wait for."""
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
