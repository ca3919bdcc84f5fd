"""How one bucket is combined over the members: as a plain sum, or as a mean over those that take part.

    Sum     one all-reduce of the whole bucket
    Mean    the same, then divided by how many members took part, half precision as `ops` says; or, compressed, two:
            the head, then the gradients in half precision (see `compression`), as means of those passed so far

Both leave the same bits on every member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.ring import Ring
from engine.collectives.ops import HALF, mean_scale
from engine.gradients.compression import Compression, Feedback, scale_for
from engine.gradients.layout import Bucket

DROPS = 8  # small whole numbers, exact in every dtype


class Combine(Protocol):
    """How one bucket is combined over the members.

    `marks`: how many leading elements of each bucket are the combiner's own; `shards`: see `Bucket`.
    """

    marks: int
    shards: int

    def __call__(self, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Combine `flat`, bucket `number`, in place."""


class Sum:
    """Combine by the sum over all members."""

    marks, shards = 0, 1

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def __call__(self, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Sum `flat` over all members, in place."""
        self._collective.all_reduce(flat)


class Mean:
    """The mean (or, with `average=False`, the sum) over the members that take part.

        marks    [ 1 or more where member i takes part | the largest magnitude among its gradients ]     i = 0..N-1

    A member without samples sets `takes_part` to False and adds nothing; `present` says which members took part in the
    last bucket. Those that do also tell `dropped`, how many results they have thrown away (modulo DROPS): `odd` are the
    members that do not agree with this one. The magnitudes are there for compression: all scale by the largest of them.
    """

    shards = 1

    def __init__(self, collective: Ring, compression: Compression, average: bool = True) -> None:
        self.takes_part = True
        self.present = [True] * len(collective.members)
        self.dropped = 0
        self.odd: list[int] = []
        self._collective, self._compression, self._average = collective, compression, average
        self.marks = 2 * len(collective.members)
        self.begin: Callable[[int], None] = lambda number: None  # called with the number of each bucket
        self._feedback: dict[int, Feedback] = {}

    def __call__(self, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Replace the gradients in `flat`, bucket `number`, by their mean or sum over those that take part."""
        self.begin(number)
        size, mine = len(self._collective.members), self._collective.position
        head, data = flat[: bucket.head], flat[bucket.head :]
        head[: self.marks] = 0
        own = 1 + self.dropped % DROPS
        head[mine] = own if self.takes_part else 0
        feedback = self._compressed(number, data)
        if feedback is not None:
            if self.takes_part:
                feedback.add_to(data)
            head[size + mine] = data.abs().max() if data.numel() else 0
            self._collective.all_reduce(head)
        elif self._average and flat.dtype in HALF:
            self._wide(flat, bucket.head)
        else:
            self._collective.all_reduce(flat)
        told = head[:size].tolist()
        self.present = [mark != 0 for mark in told]
        self.odd = [member for member, mark in zip(self._collective.members, told, strict=True) if mark not in (0, own)]
        if feedback is not None:
            self._half(feedback, data, float(head[size : 2 * size].max()))
        elif self._average and flat.dtype not in HALF:
            data.div_(max(1, sum(self.present)))

    def _compressed(self, number: int, data: Tensor) -> Feedback | None:
        """What goes with the compression of a bucket; None where it travels as it is."""
        wire = self._compression.dtype
        if wire is None or not data.is_floating_point() or data.element_size() <= wire.itemsize:
            return None
        if number not in self._feedback:
            self._feedback[number] = Feedback(data, wire)
        return self._feedback[number]

    def _wide(self, flat: Tensor, head: int) -> None:
        """The mean of half precision: summed in fp32, also on the wire."""
        size = len(self._collective.members)
        wide = flat.float()
        wide[head:].mul_(mean_scale(size))
        self._collective.all_reduce(wide)
        present = max(1, int(wide[:size].count_nonzero()))
        wide[head:].div_(present * mean_scale(size))
        flat.copy_(wide)

    def _half(self, feedback: Feedback, data: Tensor, largest: float) -> None:
        """The gradients of fp32 or fp64 in half precision; `largest` of all magnitudes."""
        scale = scale_for(largest, 1 if self._average else len(self._collective.members))
        sent = feedback.rounded(data, scale)
        if self._average:
            self._collective.mean(sent, self.present)
        else:
            self._collective.all_reduce(sent)
        data.copy_(sent)
        if scale is not None:
            data.div_(scale)
