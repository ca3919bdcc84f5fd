"""Who updates what, where not everybody updates everything: three steps around the optimizer, for one bucket.

                 Shards                             Server
    combine      reduce-scatter                     everybody sends its gradients to the server, which adds them
    own          everybody a shard                  the server everything
    spread       all-gather                         the server sends the parameters to everybody

    per rank     2(N-1)/N n sent                    a worker sends n, the server (N-1) n: what a step waits for

The server is the first member, one of the workers. With shards every worker is the server of a part (Li et al. 2014,
OSDI), which is ZeRO's first stage (Rajbhandari et al. 2020, SC, arXiv 1910.02054).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from engine.allreduces import ALLREDUCES
from engine.collectives.ops import ReduceOp
from engine.collectives.primitives.group import Group
from engine.collectives.primitives.many_to_many import all_gather_into_tensor, reduce_scatter_tensor
from engine.collectives.topologies import flat as star
from engine.collectives.trees import down, up
from engine.gradients.layout import Bucket
from engine.registry import Loaded


class Division(ABC):
    """Combines buckets as `Reducer` wants it: the head everywhere, of the gradients what a member owns."""

    marks = 0
    elementwise = False  # whether a parameter may be cut in the middle
    shards = 1

    def __init__(self, group: Group) -> None:
        self._group = group

    @classmethod
    @abstractmethod
    def owners(cls, members: int) -> range:
        """The positions of those of so many members that own anything."""

    def __call__(self, number: int, bucket: Bucket, flat: Tensor) -> None:
        self._group.collective.all_reduce(flat[: bucket.head])
        self._collect(flat[bucket.head :])

    def own(self, elements: int) -> tuple[int, int]:
        """Where this member's part of `elements` behind the head begins and ends."""
        return self.part(elements, self._group.position)

    def span(self, bucket: Bucket, position: int | None = None) -> tuple[int, int]:
        """Where the part of a member, this one unless it is given, begins and ends in a bucket, head included."""
        own = self._group.position if position is None else position
        first, last = self.part(bucket.elements - bucket.head, own)
        return bucket.head + first, bucket.head + last

    @abstractmethod
    def part(self, elements: int, position: int) -> tuple[int, int]:
        """Where the part of the member at `position` of `elements` behind the head begins and ends."""

    @abstractmethod
    def _collect(self, data: Tensor) -> None:
        """Sum what this member owns into its part of `data`; the rest is undefined afterwards."""

    @abstractmethod
    def spread(self, data: Tensor) -> None:
        """Copy every member's own part of `data` to all others."""


class Shards(Division):
    """Equal parts."""

    elementwise = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.shards = group.size

    @classmethod
    def owners(cls, members: int) -> range:
        return range(members)

    def part(self, elements: int, position: int) -> tuple[int, int]:
        length = elements // self.shards
        return position * length, (position + 1) * length

    def _collect(self, data: Tensor) -> None:
        reduce_scatter_tensor(data[slice(*self.own(len(data)))], data, group=self._group)

    def spread(self, data: Tensor) -> None:
        all_gather_into_tensor(data, data[slice(*self.own(len(data)))], group=self._group)


class Server(Division):
    """Everything for the first member."""

    @classmethod
    def owners(cls, members: int) -> range:
        return range(1)

    def part(self, elements: int, position: int) -> tuple[int, int]:
        return 0, elements if position == 0 else 0

    def _collect(self, data: Tensor) -> None:
        up(self._group.peers, star(self._group.size)[self._group.position], data, ReduceOp.SUM)

    def spread(self, data: Tensor) -> None:
        down(self._group.peers, star(self._group.size)[self._group.position], data)


DIVISIONS: Mapping[str, type[Division]] = Loaded(ALLREDUCES, lambda row: row.division)
