"""What an all-reduce costs: seconds = messages α + traffic nβ + work nγ, with the three numbers of each algorithm.

    α   seconds per message              n   bytes of the tensor
    β   seconds per byte on a link       N   ranks; links carry both directions at once
    γ   seconds per byte combined

The forms are those of Thakur, Rabenseifner & Gropp (2005, IJHPCA 19(1)); the textbook example of 160 MB over links of
16 GB/s is `EXAMPLE`. Pure: neither torch nor a run is needed to compare algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine.allreduces import ALLREDUCES
from engine.collectives.topologies import double_binary
from engine.registry import Loaded


class LinkCosts(NamedTuple):
    """Cost of a link and of an addition: α in seconds per message, β and γ in seconds per byte."""

    alpha: float
    beta: float
    gamma: float


class Terms(NamedTuple):
    """How often each of α, nβ and nγ is paid on the longest path."""

    messages: float
    traffic: float
    work: float

    def seconds(self, nbytes: float, link: LinkCosts) -> float:
        """Return the seconds that `nbytes` take over links of this cost."""
        return self.messages * link.alpha + nbytes * (self.traffic * link.beta + self.work * link.gamma)


def levels(size: int) -> int:
    """Return ceil(log2 N), the levels of a binomial tree over N ranks."""
    return (size - 1).bit_length()


def ring(size: int) -> Terms:
    """Return the terms of a ring: 2(N-1) α + 2(N-1)/N nβ + (N-1)/N nγ."""
    return Terms(2 * (size - 1), 2 * (size - 1) / size, (size - 1) / size)


def double_ring(size: int) -> Terms:
    """Return the terms of two half rings; with two members one ring already uses both directions of a link."""
    return Terms(2 * (size - 1), (size - 1) / size, (size - 1) / size) if size > 2 else ring(size)


def tree(size: int) -> Terms:
    """Return the terms of a binomial tree, up and down: ceil(log2 N) (2α + 2nβ + nγ)."""
    return Terms(2 * levels(size), 2 * levels(size), levels(size))


def double_binary_tree(size: int) -> Terms:
    """Return the terms of two half trees; pieces follow each other, so the busiest rank's own traffic counts."""
    both = list(zip(*double_binary(size), strict=True))
    traffic = max(sum(len(node.children) + (node.parent is not None) for node in nodes) for nodes in both) / 2
    work = max(sum(len(node.children) for node in nodes) for nodes in both) / 2
    return Terms(2 * levels(size), traffic, work)


def reduce_broadcast(size: int) -> Terms:
    """Return the terms of reducing to one rank, which takes one member after the other, and sending back."""
    return Terms(2 * (size - 1), 2 * (size - 1), size - 1)


def reduce_broadcast_at_once(size: int) -> Terms:
    """Return the terms of reduce_broadcast where the root's links work at once; it still adds N parts."""
    return Terms(2, 2, size) if size > 1 else Terms(0, 0, 0)


def recursive_doubling(size: int) -> Terms:
    """Return the terms of recursive doubling: log2 N (α + nβ + nγ), and a step in and out for other N."""
    steps = size.bit_length() - 1
    return _with_extra(size, Terms(steps, steps, steps))


def halving_doubling(size: int) -> Terms:
    """Return the terms of halving and doubling: 2 log2 N α + 2(N-1)/N nβ + (N-1)/N nγ, likewise."""
    core = 1 << (size.bit_length() - 1)
    return _with_extra(size, Terms(2 * (size.bit_length() - 1), 2 * (core - 1) / core, (core - 1) / core))


def _with_extra(size: int, core: Terms) -> Terms:
    """Other numbers than powers of two: who stays out hands its part over first, and gets the result back."""
    return Terms(core.messages + 2, core.traffic + 2, core.work + 1) if size & (size - 1) else core


def hierarchical(group_size: int, hosts: int) -> tuple[Terms, Terms]:
    """Return the terms inside a host and those between hosts, whose links differ."""
    inside, between = ring(group_size), ring(hosts)
    return inside, Terms(between.messages, between.traffic / group_size, between.work / group_size)


def parameter_server(workers: int) -> Terms:
    """Return the terms of a server of its own, which serves one worker after the other, in and out."""
    return Terms(2 * workers, 2 * workers, workers)


def sharded_parameter_server(size: int) -> Terms:
    """Return the terms of a shard on every worker: all take and give at once, (N-1)/N in both halves."""
    return Terms(2, 2 * (size - 1) / size, (size - 1) / size)


ALGORITHMS: Mapping[str, Callable[[int], Terms]] = Loaded(ALLREDUCES, lambda row: row.cost)

EXAMPLE_BYTES, EXAMPLE_RANKS, EXAMPLE_LINK = 160e6, 4, LinkCosts(0.0, 1 / 16e9, 0.0)
EXAMPLE: Mapping[str, Terms] = {
    "one GPU as server": reduce_broadcast(EXAMPLE_RANKS),
    "the host as server": parameter_server(EXAMPLE_RANKS),
    "a shard on every GPU": sharded_parameter_server(EXAMPLE_RANKS),
}


def example_seconds() -> dict[str, float]:
    """Return the seconds of the textbook example: 160 MB on four GPUs in 60, 80 and 15 ms."""
    return {way: terms.seconds(EXAMPLE_BYTES, EXAMPLE_LINK) for way, terms in EXAMPLE.items()}


def cheapest(names: Mapping[str, object], size: int, nbytes: float, link: LinkCosts) -> str:
    """Return the one of `names` that costs least; of equals the first."""
    return min(names, key=lambda name: ALGORITHMS[name](size).seconds(nbytes, link))
