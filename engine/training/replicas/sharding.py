"""Who updates what: everybody everything, or divided over the replicas, as `shard_optimizer` and `allreduce` say."""

from __future__ import annotations

import torch

from engine.gradients.division import DIVISIONS, Division, Shards
from engine.plan.actions import Program
from engine.settings import Settings
from engine.targets import locate

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip


def division_of(settings: Settings) -> type[Division] | None:
    """How the optimizer is divided; None where everybody updates everything."""
    return Shards if settings.shard_optimizer else DIVISIONS.get(settings.allreduce.name)


def check_sharding(settings: Settings, program: Program) -> None:
    """ValueError where there is nothing to divide the optimizer over, or it cannot be divided."""
    division, server = division_of(settings), settings.allreduce.name
    if division is None:
        return
    if settings.shard_optimizer and server == "parameter_server":
        raise ValueError(
            "shard_optimizer=true and allreduce=parameter_server contradict each other: the one divides the optimizer "
            "over all replicas, the other keeps it on one; leave one of them out, or use sharded_parameter_server"
        )
    chosen = "shard_optimizer=true" if settings.shard_optimizer else f"allreduce={server}"
    replicas = settings.data_parallel.replicas
    if program.asynchronous:
        raise ValueError(
            f"{chosen} needs whole weights at every update, and schedule={program.name} keeps several versions of "
            "them: use a synchronous schedule, or leave it out"
        )
    if replicas * program.placement.copies == 1:
        raise ValueError(
            f"{chosen} divides the optimizer over replicas, but data_parallel.replicas={replicas}: use 2 or more, or "
            "leave it out"
        )
    name = str(settings.optimizer.get("_target_"))
    found = locate(name, "optimizer")
    if division.elementwise and not (isinstance(found, type) and issubclass(found, ELEMENTWISE)):
        possible = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise ValueError(
            f"{chosen} cannot divide {name}: every element must be updated by itself, as it is by "
            f"torch.optim's {possible} and classes derived from them; use one of these, or leave it out"
        )
