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
from engine.pipeline.ties import stage_sets
from engine.training.connect import transport_of
from engine.training.replicas.reduction import collective_of
from engine.training.replicas.sharding import division_of
from engine.transport import Edge
from engine.transports import TRANSPORTS
from engine.weights.gather import edges

OWN = 12  # files that a worker has open by itself


def connections(job: Job) -> Connections:
    """Every channel and group of a run.

    Where the optimizer is divided, the copies of a stage have a channel between any two. Ranks whose weights are saved
    have one to rank 0, and all sum where they have to agree on an evaluation or on the time.
    """
    settings = job.settings
    programs = [*job.steps.values(), *job.streams.values(), *job.evaluations.values()]
    kind_of, edges_of = partial(collective_of, settings), partial(_reduction_edges, job)
    divided = division_of(settings) is not None
    asked = settings.checkpoint.best or settings.save == "best" or settings.checkpoint.every_minutes is not None
    found = communicators.connections(
        programs,
        job.placement,
        job.replicas,
        kind_of,
        edges_of,
        divided,
        everybody=asked,
        tied=stage_sets(job.ties, job.split),
    )
    return found if settings.save == "never" else found._replace(edges=[*found.edges, *edges(job.placement)])


def _reduction_edges(job: Job, kind: type[Collective], members: Sequence[int], label: str) -> list[Edge]:
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
