"""Gradient reduction of one stage over its replicas: in buckets, in the background, exact about what is absent.

    REDUCE   launch()   ──► reduce thread: for each bucket: pack, all-reduce, hand back as .grad
    STEP     wait()     ◄── done, or the thread's error

A gradient that no replica has stays None (a zero would let weight decay move the parameter); one that some replica
has is the sum over those, on all of them. The traffic is a fixed number of bytes per step, whatever the number of
micro-batches: the collective sees every bucket once, flags and 64-byte padding included (`wire_bytes`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from engine.collectives.background import ReduceThread
from engine.collectives.base import Collective
from engine.collectives.layout import Bucket, Named, cut, digest, fingerprints


class Reducer:
    """`params`: (name, parameter) in registration order; frozen ones are left out.

    `bucket_bytes`: gradients per bucket. `thread` is shared by the reducers of one rank. Building it waits for the
    other members, which must agree on the layout (ValueError). After `wait`, `.grad` is a view into a buffer that the
    next reduction reuses.
    """

    def __init__(
        self,
        params: Sequence[Named],
        collective: Collective,
        bucket_bytes: int,
        thread: ReduceThread | None = None,
    ) -> None:
        self.last_span = (0, 0)  # time.monotonic_ns at the start and the end of the last reduction
        self._collective = collective
        self._thread = thread or ReduceThread()
        self._frozen = [item for item in params if not item[1].requires_grad]
        self._buckets = cut([item for item in params if item[1].requires_grad], bucket_bytes)
        self._running: Future[None] | None = None
        self._agree()
        self._setup_bytes = collective.bytes_sent
        self._flats = [torch.zeros(b.elements, dtype=b.first.dtype, device=b.first.device) for b in self._buckets]
        self._views = [b.views(flat) for b, flat in zip(self._buckets, self._flats, strict=True)]

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent for gradients so far."""
        return self._collective.bytes_sent - self._setup_bytes

    @property
    def wire_bytes(self) -> int:
        """n of one reduction: what the collective sums."""
        return sum(bucket.nbytes for bucket in self._buckets)

    def launch(self) -> None:
        """Start reducing the gradients as they are now; returns at once. They must not be touched until `wait`.

        ValueError for a sparse gradient, for one of another dtype, and for one of a parameter that was frozen.
        """
        assert self._running is None, "launched twice"
        self._check()
        gpu = self._gpu()
        ready = None if gpu is None else torch.cuda.current_stream(gpu).record_event()
        self._running = self._thread.start(lambda: self._reduce(gpu, ready))

    def wait(self) -> None:
        """Block until the launched reduction is done; raises what it raised."""
        assert self._running is not None, "nothing was launched"
        running, self._running = self._running, None
        running.result()

    def _reduce(self, gpu: torch.device | None, ready: torch.cuda.Event | None) -> None:
        """In the reduce thread. On a GPU: in a stream of its own, behind what had produced the gradients."""
        start = time.monotonic_ns()
        stream = None if gpu is None else torch.cuda.Stream(gpu)
        with torch.no_grad(), torch.cuda.stream(stream):
            if stream is not None and ready is not None:
                stream.wait_event(ready)
            for bucket, flat, views in zip(self._buckets, self._flats, self._views, strict=True):
                _pack(bucket, flat, views)
                self._collective.all_reduce(flat)
                _unpack(bucket, flat, views)
            if stream is not None:
                stream.synchronize()
        self.last_span = (start, time.monotonic_ns())

    def _gpu(self) -> torch.device | None:
        return self._flats[0].device if self._flats and self._flats[0].is_cuda else None

    def _check(self) -> None:
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise ValueError(f"{name} was frozen when training began and has a gradient now: unfreeze it before")
        for name, parameter in (item for bucket in self._buckets for item in bucket.named):
            grad = parameter.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise ValueError(f"{name}: a {grad.layout} gradient cannot be summed over replicas; use sparse=False")
            if grad.dtype != parameter.dtype:
                raise ValueError(f"{name}: its gradient is {grad.dtype}, the parameter {parameter.dtype}")

    def _agree(self) -> None:
        """Compare the layout with the other members': their number of parameters, then every parameter."""
        prints = fingerprints(self._buckets)
        mine = [len(prints), digest("\n".join(words for _, words in prints))]
        counts, digests = zip(*self._gather(mine), strict=True)
        if len(set(digests)) == 1:
            return
        longest = max(counts)
        table = self._gather([number for number, _ in prints] + [0] * (longest - len(prints)))
        own = table[self._collective.position]
        at = next(i for i in range(longest) if any(row[i] != own[i] for row in table))
        other = next(m for m, row in zip(self._collective.members, table, strict=True) if row[at] != own[at])
        here = prints[at][1] if at < len(prints) else "no more parameters"
        raise ValueError(
            f"{self._collective.label}: replicas must hold equal stages, but their parameters differ, first at number "
            f"{at}: here (rank {self._collective.transport.rank}) {here}; rank {other} has something else"
        )

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every member's list, all of equal length: a sum in which each member fills its own row."""
        collective = self._collective
        rows = torch.zeros(len(collective.members), len(numbers), dtype=torch.int64)
        rows[collective.position] = torch.tensor(numbers, dtype=torch.int64)
        flat = rows.flatten().to(collective.transport.device)
        collective.all_reduce(flat)
        return flat.view(rows.shape).tolist()


def _pack(bucket: Bucket, flat: Tensor, views: Sequence[Tensor]) -> None:
    present = [float(parameter.grad is not None) for _, parameter in bucket.named]
    flat[: len(present)] = torch.tensor(present, dtype=flat.dtype)
    for (_, parameter), view in zip(bucket.named, views, strict=True):
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)


def _unpack(bucket: Bucket, flat: Tensor, views: Sequence[Tensor]) -> None:
    anywhere = flat[: len(views)].tolist()
    for (_, parameter), view, present in zip(bucket.named, views, anywhere, strict=True):
        parameter.grad = view if present else None
