"""Which ranks meet: every channel and group of a pipeline, in the one order in which all ranks open them.

It follows from programs and placement alone, so it is known before a rank exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from engine.collectives import Collective, Group
from engine.plan.actions import Placement, Program
from engine.plan.lowering import channels
from engine.ranks import Rank, replica_ranks
from engine.transport import Edge, Transport


class Meeting(NamedTuple):
    """A group whose members sum. `backend`: the sums are the backend's own, else short."""

    members: list[int]
    label: str
    backend: bool = False


StageSet = tuple[int, ...]  # stages that share parameters (tied weights)


class Connections(NamedTuple):
    """What a pipeline of `ranks` opens. `reduces`: stages have copies, over replicas or within one.

    `sharing[s]`: all ranks that hold a copy of stage s, and `kinds[s]` their all-reduce; `sharing[stages]`: all that
    hold a copy of one of these, between which weights are tied. One of `groups` that has a
    single member is never opened. Labels of edges and groups begin with `label`.
    """

    ranks: int
    reduces: bool
    edges: list[Edge]
    groups: list[Meeting]
    sharing: dict[int | StageSet, list[int]]
    kinds: dict[int | StageSet, type[Collective]]
    label: str = ""


EdgesOf = Callable[[type[Collective], Sequence[int], str], list[Edge]]


def connections(
    programs: Iterable[Program],
    placement: Placement,
    replicas: int,
    kind_of: Callable[[Sequence[int]], type[Collective]],
    edges_of: EdgesOf | None = None,
    divided: bool = False,
    everybody: bool = False,
    label: str = "",
    tied: Iterable[StageSet] = (),
) -> Connections:
    """The channels and groups that `programs` need, in the order in which all ranks open them.

    `kind_of(members)` is the all-reduce of a stage's copies, `edges_of(kind, members, label)` their channels (None:
    those of the all-reduce). `divided`: the optimizer is, so norms are summed over all ranks. `everybody`: there is a
    group of all ranks besides, for losses. `tied`: sets of stages between which weights are tied.
    """
    ranks = placement.ranks
    homes = {s: placement.ranks_of(s) for s in range(placement.stages)}
    sharing: dict[int | StageSet, list[int]] = {
        s: [Rank.at(r, home, ranks).world for r in range(replicas) for home in own] for s, own in homes.items()
    }
    for stages in tied:
        sharing[stages] = sorted({rank for s in stages for rank in sharing[s]})
    kinds = {s: kind_of(members) for s, members in sharing.items()}
    pairs = sorted({channel for program in programs for channel in channels(program)})
    pipelines = [replica_ranks(r, ranks) for r in range(replicas)]
    edges = [Edge(own[a], own[b], label + way) for own in pipelines for a, b, way in pairs]
    for s, members in sharing.items():
        name = _reduction(label, s)
        edges += edges_of(kinds[s], members, name) if edges_of else kinds[s].edges(members, name)
    groups = [Meeting(list(own), f"{label}norms") for own in pipelines]
    groups.append(Meeting(sharing[placement.stages - 1], f"{label}counts"))
    if divided and replicas > 1:
        groups.append(Meeting(list(range(ranks * replicas)), f"{label}norms"))
    if everybody:
        groups.append(Meeting(list(range(ranks * replicas)), f"{label}losses"))
    groups += [Meeting(members, _reduction(label, s), True) for s, members in sharing.items() if kinds[s].backend_group]
    return Connections(ranks, replicas * placement.copies > 1, edges, groups, sharing, kinds, label)


def _reduction(label: str, held: int | StageSet) -> str:
    return f"{label}reduce{held if isinstance(held, int) else '-'.join(map(str, held))}"


class Communicators:
    """Channels and groups of one rank, opened.

    `sharing[s]` holds all ranks that have a copy of this rank's stage s, `reduction[s]` is their all-reduce; so it is
    for sets of stages between which weights are tied. `me` and `world` count all ranks, `rank` those of one pipeline.
    """

    def __init__(self, found: Connections, transport: Transport) -> None:
        self._transport, self.label = transport, found.label
        self.me, self.world = transport.rank, transport.world
        _, self.replica, self.rank = Rank.of(self.me, found.ranks)
        self.reduces = found.reduces
        transport.open(found.edges)
        for members, label, backend in found.groups:
            if len(members) > 1 and self.me in members:
                transport.open_group(members, label, backend)
        self._pipeline = list(replica_ranks(self.replica, found.ranks))
        self._last = found.sharing[max(s for s in found.sharing if isinstance(s, int))]
        self._everybody = list(range(self.world))
        self.reduction: dict[int | StageSet, Collective] = {}
        self.sharing: dict[int | StageSet, Group] = {}
        for s, members in found.sharing.items():
            if self.me in members:
                name = _reduction(self.label, s)
                self.sharing[s] = Group(transport, members, name, found.kinds[s], checked=False)
                self.reduction[s] = self.sharing[s].collective

    def sum_over_pipeline(self, vector: torch.Tensor) -> None:
        """Sum a vector over the ranks of this replica, in place; waits for them."""
        if len(self._pipeline) > 1:
            self._transport.all_reduce(vector, self._pipeline, f"{self.label}norms").wait()

    def sum_over_everybody(self, vector: torch.Tensor) -> None:
        """Sum a vector over all ranks, in place; waits for them."""
        self._transport.all_reduce(vector, self._everybody, f"{self.label}norms").wait()

    def sum_losses(self, vector: torch.Tensor) -> None:
        """Sum loss sums and counts over all ranks, in place; waits for them."""
        if self.world > 1:
            self._transport.all_reduce(vector, self._everybody, f"{self.label}losses").wait()

    def sum_counts(self, count: torch.Tensor) -> Callable[[], None]:
        """Start the sum of a count over all last ranks (others take no part); the result waits for it."""
        if len(self._last) == 1 or self.me not in self._last:
            return lambda: None
        return self._transport.all_reduce(count, self._last, f"{self.label}counts").wait
