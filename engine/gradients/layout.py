"""How gradients are laid out in flat buckets: a fixed function of the parameter list, equal on every replica.

    bucket    [ marks | presence flags | pad | gradient 0 | pad | gradient 1 | ... ]      one dtype, one device
              └──────────── head ──────────┘

A flag is one element of the bucket's own dtype: 1 where this replica has the gradient, else 0. Their sum tells whether
any replica has it; adding ones never returns to zero in any floating dtype, so the flags can ride with the data.
Marks are further elements for whoever needs them (see `buckets`); the engine's own reducers have none.
Every view starts at a multiple of 64 bytes, because the kernels that read it may depend on that in the last digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

ALIGN_BYTES = 64
Named = tuple[str, nn.Parameter]


@dataclass
class Bucket:
    """Parameters of one dtype and device, in the order in which they were given. All numbers are in elements."""

    marks: int = 0
    shards: int = 1  # what follows the head can be cut into so many equal, aligned parts
    named: list[Named] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    head: int = 0
    elements: int = 0

    @property
    def first(self) -> nn.Parameter:
        """First parameter; dtype and device of all."""
        return self.named[0][1]

    @property
    def nbytes(self) -> int:
        """Bytes that the collective is given: marks, flags, gradients and padding."""
        return self.elements * self.first.element_size()

    def place(self) -> None:
        """Fix the offsets; call it once, when the bucket is complete."""
        size = self.first.element_size()
        end = self.head = aligned(self.marks + len(self.named), size)
        for _, parameter in self.named:
            self.offsets.append(end)
            end = aligned(end + parameter.numel(), size)
        lines = aligned(1, size) * self.shards
        self.elements = self.head + -(-(end - self.head) // lines) * lines

    def views(self, flat: Tensor, begins: int = 0) -> list[Tensor]:
        """Return the gradients inside `flat`, with the shapes and strides of their parameters.

        `begins`: the element of the bucket that `flat` begins with.
        """
        return [
            flat.as_strided(p.size(), dense_strides(p), flat.storage_offset() + offset - begins)
            for (_, p), offset in zip(self.named, self.offsets, strict=True)
        ]


def aligned(elements: int, size: int) -> int:
    """Round up to a whole number of 64-byte lines, in elements of `size` bytes."""
    per_line = max(1, ALIGN_BYTES // size)
    return -(-elements // per_line) * per_line


def cut(named: Sequence[Named], bucket_bytes: int, marks: int = 0, shards: int = 1) -> list[Bucket]:
    """Fill buckets in the order given, each up to `bucket_bytes` of gradients; a larger gradient gets its own."""
    buckets: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[Bucket, int]] = {}
    for name, parameter in named:
        key = parameter.dtype, parameter.device
        bucket, filled = filling.get(key, (None, 0))
        if bucket is None or filled + parameter.nbytes > bucket_bytes:
            bucket, filled = Bucket(marks, shards), 0
            buckets.append(bucket)
        bucket.named.append((name, parameter))
        filling[key] = bucket, filled + parameter.nbytes
    for bucket in buckets:
        bucket.place()
    return buckets


def fingerprints(named: Sequence[Named], bucket_bytes: int) -> list[str]:
    """Describe each parameter by everything that the layout follows from."""
    size = f"in buckets of {bucket_bytes} bytes"
    return [f"{name} {tuple(p.shape)} {p.dtype} strides {dense_strides(p)}, {size}" for name, p in named]


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's own strides where its elements are dense in some order, else row-major ones."""
    return torch.empty_like(tensor, device="meta").stride()
