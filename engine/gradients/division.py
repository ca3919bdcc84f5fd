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
    """How the optimizer's work on a bucket is divided over the members: reduce to owners, update, copy back."""

    marks = 0
    elementwise = False  # whether a parameter may be cut in the middle
    shards = 1

    def __init__(self, group: Group) -> None:
        self._group = group

    @classmethod
    @abstractmethod
    def owners(cls, members: int) -> range:
        """Return the positions of those of `members` that own anything."""

    def __call__(self, number: int, bucket: Bucket, flat: Tensor) -> None:
        """Sum the head of `flat`, bucket `number`, on everybody, and the gradients on who owns them."""
        self._group.collective.all_reduce(flat[: bucket.head])
        self._collect(flat[bucket.head :])

    def own(self, elements: int) -> tuple[int, int]:
        """Return where this member's part of `elements` behind the head begins and ends."""
        return self.part(elements, self._group.position)

    def span(self, bucket: Bucket, position: int | None = None) -> tuple[int, int]:
        """Return where the part of a member, this one unless given, begins and ends in a bucket, head included."""
        own = self._group.position if position is None else position
        first, last = self.part(bucket.elements - bucket.head, own)
        return bucket.head + first, bucket.head + last

    @abstractmethod
    def part(self, elements: int, position: int) -> tuple[int, int]:
        """Return where the part of the member at `position` begins and ends, of `elements` behind the head."""

    @abstractmethod
    def _collect(self, data: Tensor) -> None:
        """Sum what this member owns into its part of `data`; the rest is undefined afterwards."""

    @abstractmethod
    def spread(self, data: Tensor) -> None:
        """Copy every member's own part of `data` to all others."""


class Shards(Division):
    """ZeRO-1: each member owns an equal shard of every bucket."""

    elementwise = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.shards = group.size

    @classmethod
    def owners(cls, members: int) -> range:
        """Return the positions of those of `members` that own anything: all do."""
        return range(members)

    def part(self, elements: int, position: int) -> tuple[int, int]:
        """Return where the part of the member at `position` begins and ends, of `elements` behind the head."""
        length = elements // self.shards
        return position * length, (position + 1) * length

    def _collect(self, data: Tensor) -> None:
        reduce_scatter_tensor(data[slice(*self.own(len(data)))], data, group=self._group)

    def spread(self, data: Tensor) -> None:
        """Copy every member's own part of `data` to all others, by all-gather."""
        all_gather_into_tensor(data, data[slice(*self.own(len(data)))], group=self._group)


class Server(Division):
    """Parameter server on member 0: it owns everything."""

    @classmethod
    def owners(cls, members: int) -> range:
        """Return the positions of those of `members` that own anything: the first."""
        return range(1)

    def part(self, elements: int, position: int) -> tuple[int, int]:
        """Return where the part of the member at `position` begins and ends, of `elements` behind the head: all or
        nothing.
        """
        return 0, elements if position == 0 else 0

    def _collect(self, data: Tensor) -> None:
        up(self._group.peers, star(self._group.size)[self._group.position], data, ReduceOp.SUM)

    def spread(self, data: Tensor) -> None:
        """Copy `data` of the first member to all others."""
        down(self._group.peers, star(self._group.size)[self._group.position], data)


DIVISIONS: Mapping[str, type[Division]] = Loaded(ALLREDUCES, lambda row: row.division)
