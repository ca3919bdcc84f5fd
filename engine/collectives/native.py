"""The backend's own all-reduce. The run opens its group with `Transport.open_group(members, label)`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.collectives.base import Collective
from engine.runtime.transport import Edge


class Native(Collective):
    """`bytes_sent` is what a bandwidth-optimal algorithm sends, 2(N-1)/N of the tensor: backends do not tell."""

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        return []

    def _sum(self, tensor: Tensor) -> None:
        self.transport.all_reduce(tensor, self.members, self.label).wait()
        self.bytes_sent += 2 * (len(self.members) - 1) * tensor.nbytes // len(self.members)
