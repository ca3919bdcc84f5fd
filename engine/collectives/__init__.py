"""Collectives over point-to-point: all-reduce algorithms by name, and the primitives of torch.distributed.

    ring                 once around, twice: the fewest bytes, any number of members
    double_ring          two half rings in opposite directions
    tree                 a binomial tree up and down: few steps
    double_binary_tree   two half trees, in which everybody works
    reduce_broadcast     all to one, and back: what the others are compared with
    recursive_doubling   the fewest steps: for small tensors
    halving_doubling     the fewest bytes in few steps
    hierarchical         inside hosts first: the fewest bytes between hosts
    native               the backend's own
    auto                 the cheapest of ours for each size, by what the links are measured to cost

The primitives take torch.distributed's arguments in its order, and a `Group`.
"""

from __future__ import annotations

from engine.collectives.allreduce.auto import Auto
from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.double_binary_tree import DoubleBinaryTree
from engine.collectives.allreduce.double_ring import DoubleRing
from engine.collectives.allreduce.halving_doubling import HalvingDoubling
from engine.collectives.allreduce.hierarchical import Hierarchical
from engine.collectives.allreduce.native import Native
from engine.collectives.allreduce.recursive_doubling import RecursiveDoubling
from engine.collectives.allreduce.reduce_broadcast import ReduceBroadcast
from engine.collectives.allreduce.ring import Ring
from engine.collectives.allreduce.tree import Tree
from engine.collectives.ops import SUMMABLE, ReduceOp
from engine.collectives.primitives.exchange import all_to_all, all_to_all_single
from engine.collectives.primitives.group import Group
from engine.collectives.primitives.many_to_many import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    barrier,
    reduce_scatter,
    reduce_scatter_tensor,
)
from engine.collectives.primitives.many_to_one import gather, reduce
from engine.collectives.primitives.one_to_many import broadcast, scatter

COLLECTIVES: dict[str, type[Collective]] = {
    "ring": Ring,
    "double_ring": DoubleRing,
    "tree": Tree,
    "double_binary_tree": DoubleBinaryTree,
    "reduce_broadcast": ReduceBroadcast,
    "recursive_doubling": RecursiveDoubling,
    "halving_doubling": HalvingDoubling,
    "hierarchical": Hierarchical,
    "native": Native,
    "auto": Auto,
}

__all__ = [
    "COLLECTIVES",
    "SUMMABLE",
    "Collective",
    "Group",
    "Hierarchical",
    "Native",
    "ReduceOp",
    "Ring",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
]
