"""What every collective is: an in-place, blocking sum over some ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runtime.transport import Edge, Transport

# bool is left out: its sum is a question of taste. Half precision is added in fp32 and rounded at each hop.
SUMMABLE = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
})  # fmt: skip


class Collective(ABC):
    """The sum over `members` (world ranks; their order is the ring's), seen from the transport's own rank.

    `label` tells collectives over the same ranks apart. `bytes_sent` counts the payload this rank has sent so far.
    """

    def __init__(self, transport: Transport, members: Sequence[int], label: str) -> None:
        self.transport = transport
        self.members = tuple(members)
        self.label = label
        self.position = self.members.index(transport.rank)
        self.bytes_sent = 0

    @classmethod
    @abstractmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """The channels that the run must open, on all ranks, before the collective is built."""

    @abstractmethod
    def _sum(self, tensor: Tensor) -> None:
        """All-reduce a checked, non-empty tensor over two members or more."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a contiguous [n] tensor over the members, in place; equal n and dtype on all of them.

        ValueError where the dtype has no sum here or the tensor is not flat.
        """
        if tensor.dtype not in SUMMABLE:
            names = sorted(str(dtype).removeprefix("torch.") for dtype in SUMMABLE)
            raise ValueError(f"all-reduce {self.label}: no sum of {tensor.dtype} is defined; use one of {names}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"all-reduce {self.label}: the tensor must be contiguous and flat, not {tensor.shape}")
        if len(self.members) > 1 and tensor.numel():
            with torch.no_grad():
                self._sum(tensor)
