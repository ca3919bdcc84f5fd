"""Which all-reduce the replicas use: the configured name, and for `hierarchical` what a host is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.allreduces import ALLREDUCES
from engine.collectives import Collective
from engine.environment import ranks_per_host
from engine.registry import load
from engine.settings import Settings


def grouped(settings: Settings) -> Settings:
    """The settings with `allreduce.group_size` filled in, in replicas per host.

    Where it is null: what the launcher's hosts hold, and 1 (all replicas meet across hosts) where hosts do not hold
    whole replicas, or not equally many. ValueError where a configured one does not divide the replicas.
    """
    chosen, replicas = settings.allreduce, settings.data_parallel.replicas
    if not ALLREDUCES[chosen.name].grouped:
        return settings
    size = chosen.group_size
    if size is None:
        whole, rest = divmod(ranks_per_host(settings.world), settings.pipeline.ranks)
        size = whole if whole and not rest and replicas % whole == 0 else 1
    load(ALLREDUCES[chosen.name].kind).grouped(size).rings(replicas)
    return replace(settings, allreduce=replace(chosen, group_size=size))


def collective_of(settings: Settings, members: Sequence[int]) -> type[Collective]:
    """The all-reduce of a stage's copies, `members`: one or more per replica."""
    row = ALLREDUCES[settings.allreduce.name]
    kind: type[Collective] = load(row.kind)
    if row.grouped:
        per_replica = len(members) // settings.data_parallel.replicas
        kind = load(row.kind).grouped((settings.allreduce.group_size or 1) * per_replica)
    return kind
