"""Which ranks meet: every channel and group of a run, in the one order in which all ranks open them.

It follows from the job alone, so the parent knows it before a worker exists: which links there are, and how many files
each rank will have open at least.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from engine.collectives import Collective, Group
from engine.environment import open_files
from engine.gradients.servers.pushes import PushReducer
from engine.job import Job
from engine.plan.lowering import channels
from engine.training.meet import transport_of
from engine.training.reduction import collective_of
from engine.training.sharding import division_of
from engine.transport import Edge
from engine.transports import TRANSPORTS

OWN = 12  # files that a worker has open by itself


class Meeting(NamedTuple):
    """A group whose members sum. `backend`: the sums are the backend's own, else short."""

    members: list[int]
    label: str
    backend: bool = False


class Connections(NamedTuple):
    """`sharing[s]`: all ranks that hold a copy of stage s, and `kinds[s]` their all-reduce. One of `groups` that has
    a single member is never opened."""

    edges: list[Edge]
    groups: list[Meeting]
    sharing: dict[int, list[int]]
    kinds: dict[int, type[Collective]]


def connections(job: Job) -> Connections:
    """All of the run's. Where the optimizer is divided, the copies of a stage have a channel between any two."""
    owners = {s: job.placement.ranks_of(s) for s in range(job.placement.stages)}
    sharing = {s: [r * job.ranks + o for r in range(job.replicas) for o in own] for s, own in owners.items()}
    kinds = {s: collective_of(job.settings, members) for s, members in sharing.items()}
    edges = _pipeline_edges(job)
    for s, members in sharing.items():
        edges += _reduction_edges(job, kinds[s], members, f"reduce{s}")
    groups = [Meeting([r * job.ranks + p for p in range(job.ranks)], "norms") for r in range(job.replicas)]
    groups.append(Meeting(sharing[job.placement.stages - 1], "counts"))
    if division_of(job.settings) is not None and job.replicas > 1:
        groups.append(Meeting(list(range(job.world)), "norms"))
    groups += [Meeting(members, f"reduce{s}", True) for s, members in sharing.items() if kinds[s].backend_group]
    return Connections(edges, groups, sharing, kinds)


def _pipeline_edges(job: Job) -> list[Edge]:
    programs = [*job.steps.values(), *job.streams.values(), *job.evaluations.values()]
    pairs = sorted({channel for program in programs for channel in channels(program)})
    return [
        Edge(replica * job.ranks + src, replica * job.ranks + dst, kind)
        for replica in range(job.replicas)
        for src, dst, kind in pairs
    ]


def _reduction_edges(job: Job, kind: type[Collective], members: list[int], label: str) -> list[Edge]:
    """What the copies of a stage need."""
    division = division_of(job.settings)
    if division is None:
        return kind.edges(members, label)
    if job.settings.data_parallel.asynchronous:
        return [*kind.edges(members, label), *PushReducer.edges(members, label, division)]
    return Group.edges(members, label, kind)


def files_needed(job: Job, found: Connections) -> Counter[int]:
    """Files that the process of each world rank has open at least, where the transport's are counted."""
    transport = transport_of(job.settings)
    backend = TRANSPORTS[transport.backend or transport.name]
    needed = Counter(dict.fromkeys(range(job.world), OWN))
    users: dict[str, set[int]] = {transport.name: set(), backend.name: set()}
    for edge in found.edges:
        needed.update(dict.fromkeys((edge.src, edge.dst), transport.files_per_end or 0))
        users[transport.name].update((edge.src, edge.dst))
    for members, _, by_backend in found.groups:
        needed.update(dict.fromkeys(members, len(members) - 1))  # a connection to each of the others
        users[(backend if by_backend else transport).name].update(members if len(members) > 1 else ())
    for name, ranks in users.items():
        needed.update(dict.fromkeys(ranks, TRANSPORTS[name].files_per_rank))
    return needed


def check_open_files(job: Job, found: Connections) -> None:
    """ValueError where a rank meets more others than the limit on open files lets it."""
    if transport_of(job.settings).files_per_end is None:
        return
    ((rank, needed),) = files_needed(job, found).most_common(1)
    if needed > open_files():
        ends = sum(rank in (edge.src, edge.dst) for edge in found.edges)
        raise ValueError(
            f"a process may open {open_files()} files here, and rank {rank} needs {needed} or more: it has {ends} "
            f"channels to other ranks. Raise the limit (ulimit -n {max(1024, 2 * needed)}), or lower "
            "data_parallel.replicas or pipeline.ranks"
        )
