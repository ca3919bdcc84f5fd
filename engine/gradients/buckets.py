"""Gradient reduction of one stage over its replicas: in buckets, in the background, exact about what is absent.

    expect()            the backward that follows is the step's last
    seen(i)             parameter i has its gradient: a full bucket starts   ┐ reduce thread: pack, combine,
    REDUCE   launch()   whatever has not started does                        ┘ hand back as .grad
    STEP     wait()     ◄── done, or the thread's error

Buckets go from the last parameter to the first, which is about the order in which a backward makes gradients, and
start in that order (`order`): while later ones are still being computed, those that are there already travel.

A gradient that no replica has stays None (a zero would let weight decay move the parameter); one that some replica
has is the sum over those, on all of them. The traffic is a fixed number of bytes per step, whatever the number of
micro-batches: the collective sees every bucket once, flags and 64-byte padding included (`wire_bytes`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.gradients.background import ReduceThread
from engine.gradients.combine import Combine, Sum
from engine.gradients.layout import Bucket, Named, cut, fingerprints
from engine.gradients.layout_check import require_alike
from engine.gradients.order import Order


class Reduced(NamedTuple):
    """Times of a bucket's reduction, by time.monotonic_ns: gradients complete, begun, ended."""

    ready: int
    start: int
    end: int


class Reducer:
    """Sum the gradients of one stage over its replicas: in buckets, behind the computation.

    `params`: (name, parameter) in registration order; frozen ones are left out. `bucket_bytes`: gradients per bucket.
    `thread` and `order` are shared by the reducers of one rank, `combine` says how a bucket is combined (default:
    summed). Building it waits for the other members, which must agree on the layout (ValueError). After `wait`, `.grad`
    is a view into a buffer that the next reduction reuses.
    """

    def __init__(
        self,
        params: Sequence[Named],
        collective: Collective,
        bucket_bytes: int,
        thread: ReduceThread | None = None,
        order: Order | None = None,
        combine: Combine | None = None,
    ) -> None:
        self.spans: list[Reduced] = []  # of the last step's buckets, in the order in which they start
        self._collective = collective
        self._combine = combine or Sum(collective)
        self._thread = thread or ReduceThread()
        self._order = order or Order()
        self._frozen = [item for item in params if not item[1].requires_grad]
        self.named = [item for item in params if item[1].requires_grad]
        prints = fingerprints(self.named, bucket_bytes)
        require_alike(collective, prints, "replicas must hold equal stages", "parameters")
        self._setup_bytes, self.bytes_sent = collective.bytes_sent, 0  # for gradients, up to the last `wait`
        self.buckets = cut(self.named[::-1], bucket_bytes, self._combine.marks, self._combine.shards)
        self._flats = [collective.peers.memory(b.elements, b.first.dtype, b.first.device) for b in self.buckets]
        self._views = [b.views(flat) for b, flat in zip(self.buckets, self._flats, strict=True)]
        self._turns = [self._order.add(partial(self._start, number)) for number in range(len(self.buckets))]
        homes = {id(p): number for number, bucket in enumerate(self.buckets) for _, p in bucket.named}
        self._home = [homes[id(p)] for _, p in self.named]
        self._missing: list[set[int]] = []  # per bucket the parameters not yet seen, while a last backward is expected
        self._handed_over: dict[int, int] = {}  # when a bucket was ready, whether its turn has come or not
        self._running: list[Future[None]] | None = None
        gpu = self._flats[0].device if self._flats and self._flats[0].is_cuda else None
        self._stream = None if gpu is None else torch.cuda.Stream(gpu)

    @property
    def wire_bytes(self) -> int:
        """Bytes of one reduction: what the collective sums."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def expect(self) -> None:
        """Reduce each bucket as soon as `seen` has named all of its gradients: from now on they are final."""
        self._missing = [set() for _ in self.buckets]
        for number, home in enumerate(self._home):
            self._missing[home].add(number)

    def seen(self, number: int) -> None:
        """Note that the gradient of parameter `number` (in `named`) is complete; ignored unless `expect` was called."""
        if self._missing:
            home = self._home[number]
            waiting = self._missing[home]
            waiting.discard(number)
            if not waiting and home not in self._handed_over:
                self._hand_over(home)

    def launch(self) -> None:
        """Start reducing the gradients as they are now; returns at once. They must not be touched until `wait`.

        ValueError for a sparse gradient, for one of another dtype, and for one of a parameter that was frozen.
        """
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise ValueError(f"{name} was frozen when training began and has a gradient now: unfreeze it before")
        self._missing = []
        self._running = self._running or []
        for number in range(len(self.buckets)):
            if number not in self._handed_over:
                self._hand_over(number)

    def wait(self, patience_s: float | None = None) -> None:
        """Block until the launched reduction is done; raises what it raised.

        TimeoutError after `patience_s` seconds; it can then be called again.
        """
        assert self._running is not None, "nothing was launched"
        assert len(self._running) == len(self.buckets), "another reducer's buckets come first and were not launched"
        for future in self._running:
            future.result(patience_s)
        self._running = None
        self._handed_over.clear()
        self.bytes_sent = self._collective.bytes_sent - self._setup_bytes

    def _hand_over(self, number: int) -> None:
        _check(self.buckets[number])
        self._handed_over[number] = time.monotonic_ns()
        self._order.ready(self._turns[number])

    def _start(self, number: int) -> None:
        """Its turn has come. On a GPU it goes behind what has produced the gradients."""
        if not self._running:
            self._running, self.spans = [], []
        stream = None if self._stream is None else torch.cuda.current_stream(self._stream.device)
        ready = None if stream is None else stream.record_event()
        since = self._handed_over[number]
        self._running.append(self._thread.start(lambda: self._reduce(number, since, ready)))

    def _reduce(self, number: int, since: int, ready: torch.cuda.Event | None) -> None:
        """In the reduce thread; on a GPU in a stream of its own. `since`: when its gradients were there."""
        start = time.monotonic_ns()
        bucket, flat = self.buckets[number], self._flats[number]
        with torch.no_grad(), torch.cuda.stream(self._stream):
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            _pack(bucket, flat, self._views[number])
            self._combine(number, bucket, flat)
            self._hand_back(number)
            if self._stream is not None:
                self._stream.synchronize()
        self.spans.append(Reduced(since, start, time.monotonic_ns()))

    def _hand_back(self, number: int) -> None:
        """Set the gradients to what has come out."""
        bucket, flat, views = self.buckets[number], self._flats[number], self._views[number]
        anywhere = flat[bucket.marks : bucket.marks + len(views)].tolist()
        for (_, parameter), view, present in zip(bucket.named, views, anywhere, strict=True):
            parameter.grad = view if present else None


def _check(bucket: Bucket) -> None:
    for name, parameter in bucket.named:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise ValueError(f"{name}: a {grad.layout} gradient cannot be summed over replicas; use sparse=False")
        if grad.dtype != parameter.dtype:
            raise ValueError(f"{name}: its gradient is {grad.dtype}, the parameter {parameter.dtype}")


def _pack(bucket: Bucket, flat: Tensor, views: Sequence[Tensor]) -> None:
    present = [float(parameter.grad is not None) for _, parameter in bucket.named]
    flat[bucket.marks : bucket.marks + len(present)] = torch.tensor(present, dtype=flat.dtype)
    for (_, parameter), view in zip(bucket.named, views, strict=True):
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
