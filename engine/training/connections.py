"""Which ranks meet: every channel and group of a run, in the one order in which all ranks open them.

It follows from the job alone, so the parent knows it before a worker exists: which links there are, and how many files
each rank will have open at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from engine.collectives import Collective, Group
from engine.environment import open_files
from engine.gradients.servers.pushes import PushReducer
from engine.job import Job
from engine.pipeline import communicators
from engine.pipeline.communicators import Connections
from engine.training.connect import transport_of
from engine.training.reduction import collective_of
from engine.training.sharding import division_of
from engine.transport import Edge

# Files that a worker has open: by itself, as gloo's device, for its end of a channel. The channel's segments of shared
# memory, which come with its messages, are one each or more.
OWN, GLOO = 12, 4
PER_END = {"shared_memory": 4, "gloo": 1}  # socket, two event counters, the ring; a connection


def connections(job: Job) -> Connections:
    """Every channel and group of a run.

    Where the optimizer is divided, the copies of a stage have a channel between any two.
    """
    settings = job.settings
    programs = [*job.steps.values(), *job.streams.values(), *job.evaluations.values()]
    kind_of, edges_of = partial(collective_of, settings), partial(_reduction_edges, job)
    divided = division_of(settings) is not None
    return communicators.connections(programs, job.placement, job.replicas, kind_of, edges_of, divided)


def _reduction_edges(job: Job, kind: type[Collective], members: Sequence[int], label: str) -> list[Edge]:
    """What the copies of a stage need."""
    division = division_of(job.settings)
    if division is None:
        return kind.edges(members, label)
    if job.settings.data_parallel.asynchronous:
        return [*kind.edges(members, label), *PushReducer.edges(members, label, division)]
    return Group.edges(members, label, kind)


def files_needed(job: Job, found: Connections) -> Counter[int]:
    """Files that the process of each world rank has open at least, where ranks are processes that compute on CPUs."""
    transport = transport_of(job.settings)
    needed = Counter(dict.fromkeys(range(job.world), OWN))
    gloo: set[int] = set()
    for edge in found.edges:
        needed.update(dict.fromkeys((edge.src, edge.dst), PER_END[transport]))
        gloo.update((edge.src, edge.dst) if transport == "gloo" else ())
    for members, _, backend in found.groups:
        needed.update(dict.fromkeys(members, len(members) - 1))  # a connection to each of the others
        gloo.update(members if len(members) > 1 and (backend or transport == "gloo") else ())
    needed.update(dict.fromkeys(gloo, GLOO))
    return needed


def check_open_files(job: Job, found: Connections) -> None:
    """ValueError where a rank meets more others than the limit on open files lets it."""
    if job.settings.launch != "processes" or job.settings.device != "cpu":
        return
    ((rank, needed),) = files_needed(job, found).most_common(1)
    if needed > open_files():
        ends = sum(rank in (edge.src, edge.dst) for edge in found.edges)
        raise ValueError(
            f"a process may open {open_files()} files here, and rank {rank} needs {needed} or more: it has {ends} "
            f"channels to other ranks. Raise the limit (ulimit -n {max(1024, 2 * needed)}), or lower "
            "data_parallel.replicas or pipeline.ranks"
        )
