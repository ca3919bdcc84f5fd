"""The backend's own all-reduce. The run opens its group with `Transport.open_group(.., backend=True)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.ops import ReduceOp
from engine.transport import Edge


class Native(Collective):
    """The backend's own sums and means.

    `bytes_sent` is what a bandwidth-optimal algorithm sends, 2(N-1)/N of the tensor: backends do not tell.
    """

    backend_group: ClassVar[bool] = True

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return no channels: the backend's group has its own."""
        return []

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(f"all-reduce {self.label}: allreduce=native has no {op.value}; allreduce=ring does")
        self.transport.all_reduce(tensor, self.members, self.label).wait()
        self.peers.sent.nbytes += 2 * (len(self.members) - 1) * tensor.nbytes // len(self.members)
