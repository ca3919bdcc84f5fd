"""What a pipeline is made of besides its layers: found here for `engine.Pipeline`, or proven before by a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.collectives import COLLECTIVES, Collective, Group, Hierarchical
from engine.distributed.world import World
from engine.pipeline.communicators import Connections, connections
from engine.pipeline.executor import Observer
from engine.pipeline.layers import GivenLayer
from engine.pipeline.losses import Loss
from engine.pipeline.tables import FoundTables, Tables
from engine.pipeline.ties import stage_sets
from engine.pipeline.updates.updater import Updater, UpdateRules
from engine.plan.programs import StepPrograms
from engine.plan.schedules import SCHEDULES
from engine.telemetry.trace import Tracer
from engine.transport import Transport
from engine.transport.threads import ThreadTransport


def untraced() -> Tracer:
    """A tracer whose marks are free."""
    tracer = Tracer()
    tracer.on = False
    return tracer


@dataclass(frozen=True)
class Prepared:
    """Everything that all ranks agree on, and what one rank measures.

    `dtype` is that of the parameters. `updater` makes the `StageUpdates`, `observer` is told of waits and updates.
    `independent`: replicas do not wait for each other, and each counts its own share of the batch.
    """

    tables: Tables
    connections: Connections
    transport: Transport
    rules: UpdateRules
    dtype: torch.dtype
    updater: Callable[..., Updater] = Updater
    tracer: Tracer = field(default_factory=untraced)
    observer: Observer = field(default_factory=Observer)
    independent: bool = False


def device_in(world: World, device: torch.device | str | None) -> torch.device:
    """Where a rank of `world` computes; by default where its transport is.

    ValueError for a device between whose kind the ranks are not connected; ranks that are threads share all of them.
    """
    connected = world.transport.device
    chosen = connected if device is None else torch.device(device)
    if chosen.type != connected.type and not isinstance(world.transport, ThreadTransport):
        raise ValueError(
            f"device={chosen}, but the ranks are connected for {connected.type}: call "
            f"engine.init(device={chosen.type!r}) first, or leave device out"
        )
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={chosen}, but torch finds no GPU here: use device='cpu', or leave device out")
    return chosen


def prepare_alone(
    layers: Sequence[GivenLayer],
    loss: Loss,
    world: World,
    *,
    schedule: str,
    microbatches: int,
    ranks: int | None,
    replicas: int,
    options: Mapping[str, Any],
    split: Sequence[str] | None,
    allreduce: str | type[Collective],
    rules: UpdateRules,
    device: torch.device,
    dtype: torch.dtype | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Prepared:
    """What each rank of `world` finds out alike. ValueError for whatever cannot be, before anything is opened."""
    ranks = _ranks(world.size, ranks, replicas)
    divided = rules.division is not None
    programs = StepPrograms(schedule, ranks, microbatches, options, replicas, divided)
    _check_rules(programs, rules)
    kind = _collective(allreduce)
    tables = FoundTables(layers, loss, programs, split, device, dtype, autocast)
    edges_of = (lambda kind, members, label: Group.edges(members, label, kind)) if divided else None
    label = f"{world.next_label('pipeline')} "
    found = connections(
        tables.programs(),
        tables.placement,
        replicas,
        lambda _: kind,
        edges_of,
        divided,
        everybody=True,
        label=label,
        tied=stage_sets(tables.ties, tables.split),
    )
    return Prepared(tables, found, world.transport, rules, dtype or tables.dtype)


def _ranks(world: int, ranks: int | None, replicas: int) -> int:
    """Ranks of one pipeline among `world` ranks; ValueError where they do not add up."""
    for name, number in (("ranks", ranks), ("replicas", replicas)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r} must be a whole number, at least 1")
    wanted = (ranks or max(1, world // replicas)) * replicas
    if wanted == world:
        return wanted // replicas
    asked = f"ranks={wanted // replicas} and replicas={replicas} need {wanted} ranks"
    if world == 1:
        raise ValueError(
            f"{asked}, and this process is alone: start it through torchrun --nproc-per-node={wanted}, or call the "
            f"loop through engine.run_threads({wanted}, loop)"
        )
    raise ValueError(f"{asked}, and there are {world}: start {wanted}, or choose ranks x replicas = {world}")


def _check_rules(programs: StepPrograms, rules: UpdateRules) -> None:
    name = programs.schedule
    if programs.asynchronous and rules.optimizer is None:
        synchronous = ", ".join(sorted(n for n, info in SCHEDULES.items() if info.offered and info.stream is None))
        raise ValueError(
            f"schedule={name!r} updates the weights while micro-batches are in flight, so it needs optimizer=, for "
            f"instance functools.partial(torch.optim.SGD, lr=0.1); synchronous schedules do without: {synchronous}"
        )
    if programs.asynchronous and rules.clip_norm is not None:
        raise ValueError(
            f"clip_norm={rules.clip_norm} needs a moment at which all gradients are there, and schedule={name!r} has "
            "none: leave it out, or use a synchronous schedule"
        )
    if rules.optimizer is None and (rules.clip_norm is not None or rules.lr_scheduler is not None):
        what = "clip_norm" if rules.clip_norm is not None else "lr_scheduler"
        raise ValueError(
            f"{what}= is for updates by the pipeline, which optimizer= asks for; without one call clip_grad_norm_() "
            "and your own scheduler between step() and your optimizer's step"
        )
    if rules.division is not None and (rules.optimizer is None or programs.asynchronous or not programs.reduces):
        raise ValueError(
            "shard_optimizer=True divides the pipeline's own optimizer over the copies of a stage: give optimizer=, a "
            "synchronous schedule, and replicas=2 or more"
        )


def _collective(allreduce: str | type[Collective]) -> type[Collective]:
    if isinstance(allreduce, type) and issubclass(allreduce, Collective):
        return allreduce
    possible = {name: kind for name, kind in COLLECTIVES.items() if kind is not Hierarchical}
    if allreduce not in possible:
        raise ValueError(
            f"allreduce={allreduce!r}: there is {', '.join(possible)}, or a class of engine.collectives such as "
            "Hierarchical.grouped(2)"
        )
    return possible[allreduce]
