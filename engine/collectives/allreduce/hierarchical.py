"""Hosts first: reduce inside each host, across hosts only what one member owns, then copy inside again.

host A   0 ═ 1        1. reduce-scatter in each host         everybody owns 1/g of its host's sum
         ║   ║        2. all-reduce across hosts             place by place: only 2(M-1)/M n/g leaves a host
host B   2 ═ 3        3. all-gather in each host             per member

2(g-1)αi + 2(g-1)/g nβi + 2(M-1)αe + 2(M-1)/M (n/g) βe          g members on each of M hosts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.ring_pass import RingPass, run
from engine.collectives.ops import ReduceOp
from engine.collectives.peers import mesh
from engine.transport import Edge


class Hierarchical(Collective):
    """Rings inside hosts and between them.

    Hosts are runs of `group_size` members in their order; None: all members are on one.
    """

    group_size: ClassVar[int | None] = None

    @property
    def algorithm(self) -> str:
        """Name of the algorithm, with the size of a host where one is given."""
        return super().algorithm + (f" of {self.group_size}" if self.group_size else "")

    @classmethod
    def grouped(cls, group_size: int | None) -> type[Hierarchical]:
        """Return the same class for hosts of `group_size` members."""
        return type(cls.__name__, (cls,), {"group_size": group_size})

    @classmethod
    def rings(cls, size: int) -> tuple[list[range], list[range]]:
        """Return the positions of each host, and those that form a ring across hosts.

        ValueError where hosts would be unequal.
        """
        inside = cls.group_size or size
        if size % inside:
            raise ValueError(
                f"allreduce=hierarchical makes groups of {inside} replicas, but there are {size}: "
                f"choose an allreduce.group_size that divides {size}, or allreduce=ring"
            )
        hosts = [range(first, first + inside) for first in range(0, size, inside)]
        return hosts, [range(place, size, inside) for place in range(inside)]

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        """Return the channels that the algorithm sends over, for `Transport.open`."""
        hosts, across = cls.rings(len(members))
        return mesh(members, [pair for order in [*hosts, *across] for pair in RingPass.pairs(order)], label)

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        hosts, across = self.rings(self.peers.size)
        host = RingPass(self.peers, next(order for order in hosts if self.position in order), "host")
        others = RingPass(self.peers, next(order for order in across if self.position in order), "across")
        run(host.turn(tensor, op, host.reduce_scatter))
        own = host.own(tensor)
        if len(own):
            run(others.turn(own, op, others.all_reduce))
        run(host.turn(tensor, op, host.all_gather))
