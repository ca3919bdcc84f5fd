"""What every all-reduce is: an in-place, blocking reduction over some ranks. One algorithm per file, by name in
`COLLECTIVES`.

An algorithm does not check that its members call alike: whoever uses it agrees on that before (`Reducer` compares
layouts once; `Group` compares every call).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from engine.collectives.ops import ReduceOp
from engine.collectives.peers import Peers
from engine.transport import Edge, Transport


class Collective(ABC):
    """An all-reduce over `members`, seen from the transport's own rank.

    `members` are world ranks, in the algorithm's order. `label` tells collectives over the same ranks apart.
    """

    backend_group: ClassVar[bool] = False  # whether the run must open a group with `Transport.open_group`

    def __init__(self, transport: Transport, members: Sequence[int], label: str) -> None:
        self.transport = transport
        self.members = tuple(members)
        self.label = label
        self.peers = Peers(transport, members, label)
        self.position = self.peers.position

    @property
    def algorithm(self) -> str:
        """Name of the algorithm, as in `COLLECTIVES`."""
        return re.sub("(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return self.peers.sent.nbytes

    @property
    def messages_sent(self) -> int:
        """Messages that this rank has sent so far, those of empty tensors left out."""
        return self.peers.sent.messages

    @classmethod
    @abstractmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return the channels that the run must open, on all ranks, before the collective is built."""

    @abstractmethod
    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """All-reduce a checked, non-empty tensor over two members or more; a mean is treated as a sum."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduce a contiguous [n] tensor over the members, in place; equal n, dtype and op on all of them.

        ValueError where `op` is not defined for the dtype, or the tensor is not flat.
        """
        if refusal := op.refusal(tensor.dtype):
            raise ValueError(f"all-reduce {self.label}: {refusal}")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"all-reduce {self.label}: the tensor must be contiguous and flat, not {tensor.shape}")
        if len(self.members) > 1 and tensor.numel():
            with torch.no_grad():
                parts = op.prepare(tensor, len(self.members))
                self._reduce(parts, op)
                op.finish(parts, len(self.members), tensor.dtype)
                if parts is not tensor:
                    tensor.copy_(parts)
