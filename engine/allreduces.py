"""Every choice of `allreduce=` in one table: the all-reduce algorithms, and what replaces an all-reduce.

An all-reduce is one file in `engine/collectives/allreduce/` with a `Collective`, and one row here. The choices of
`allreduce=`, what `auto` considers, the cost model's tables, the benchmarks and the tests take it from the row. All
work for any number of members. Pure data: what a row names is imported when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALGORITHMS = "engine.collectives.allreduce"
_COSTS = f"{_ALGORITHMS}.costs"
_DIVISIONS = "engine.gradients.division"


@dataclass(frozen=True)
class AllReduceInfo:
    """A choice of `allreduce=`.

    `kind` names the `Collective`. `cost` names its formula, a function of the number of members that returns `Terms`;
    None where there is none of that form. `auto`: whether allreduce=auto considers it. `grouped`: whether it has
    members in groups of `allreduce.group_size`. `division` names the `Division` of what also divides the optimizer;
    `kind` then reduces flags and statistics only.
    """

    name: str
    summary: str
    kind: str
    cost: str | None = None
    auto: bool = False
    grouped: bool = False
    division: str | None = None


# Of algorithms that cost the same `auto` takes the first.
ALLREDUCES: dict[str, AllReduceInfo] = {
    info.name: info
    for info in (
        AllReduceInfo(
            "ring",
            "once around, twice: the fewest bytes, any number of members",
            f"{_ALGORITHMS}.ring:Ring",
            f"{_COSTS}:ring",
            auto=True,
        ),
        AllReduceInfo(
            "double_ring",
            "two half rings in opposite directions",
            f"{_ALGORITHMS}.double_ring:DoubleRing",
            f"{_COSTS}:double_ring",
        ),
        AllReduceInfo("tree", "a binomial tree up and down: few steps", f"{_ALGORITHMS}.tree:Tree", f"{_COSTS}:tree"),
        AllReduceInfo(
            "double_binary_tree",
            "two half trees, in which everybody works",
            f"{_ALGORITHMS}.double_binary_tree:DoubleBinaryTree",
            f"{_COSTS}:double_binary_tree",
        ),
        AllReduceInfo(
            "reduce_broadcast",
            "all to one, and back: what the others are compared with",
            f"{_ALGORITHMS}.reduce_broadcast:ReduceBroadcast",
            f"{_COSTS}:reduce_broadcast",
        ),
        AllReduceInfo(
            "recursive_doubling",
            "the fewest steps: for small tensors",
            f"{_ALGORITHMS}.recursive_doubling:RecursiveDoubling",
            f"{_COSTS}:recursive_doubling",
            auto=True,
        ),
        AllReduceInfo(
            "halving_doubling",
            "the fewest bytes in few steps",
            f"{_ALGORITHMS}.halving_doubling:HalvingDoubling",
            f"{_COSTS}:halving_doubling",
            auto=True,
        ),
        AllReduceInfo(
            "hierarchical",
            "inside hosts first: the fewest bytes between hosts",
            f"{_ALGORITHMS}.hierarchical:Hierarchical",
            grouped=True,
        ),
        AllReduceInfo("native", "the backend's own", f"{_ALGORITHMS}.native:Native"),
        AllReduceInfo(
            "auto",
            "the cheapest for each size, by what the links are measured to cost",
            f"{_ALGORITHMS}.auto:Auto",
        ),
        AllReduceInfo(
            "parameter_server",
            "the first replica adds gradients, updates, and sends parameters back",
            f"{_ALGORITHMS}.ring:Ring",
            division=f"{_DIVISIONS}:Server",
        ),
        AllReduceInfo(
            "sharded_parameter_server",
            "every replica is the server of an equal shard",
            f"{_ALGORITHMS}.ring:Ring",
            division=f"{_DIVISIONS}:Shards",
        ),
    )
}
