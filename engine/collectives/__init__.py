"""Collectives over point-to-point: all-reduce algorithms by name, and the primitives of torch.distributed.

`COLLECTIVES` holds the algorithms of `engine/allreduces.py`, each in a file of its own in `allreduce/`.
The primitives take torch.distributed's arguments in its order, and a `Group`.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.allreduces import ALLREDUCES
from engine.collectives.allreduce.base import Collective
from engine.collectives.allreduce.hierarchical import Hierarchical
from engine.collectives.allreduce.native import Native
from engine.collectives.allreduce.ring import Ring
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
from engine.registry import Loaded

COLLECTIVES: Mapping[str, type[Collective]] = Loaded(ALLREDUCES, lambda row: None if row.division else row.kind)

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
