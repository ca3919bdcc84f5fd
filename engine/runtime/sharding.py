"""What `shard_optimizer=true` can divide: optimizers that treat every element of a parameter by itself."""

from __future__ import annotations

import torch

from engine.plan.actions import Program
from engine.settings import Settings
from engine.targets import locate

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip


def check_sharding(settings: Settings, program: Program) -> None:
    """ValueError where there is nothing to divide the optimizer over, or it cannot be divided."""
    if not settings.shard_optimizer:
        return
    replicas = settings.data_parallel.replicas
    if program.asynchronous:
        raise ValueError(
            f"shard_optimizer=true needs whole weights at every update, and schedule={program.name} keeps several "
            "versions of them: use a synchronous schedule, or shard_optimizer=false"
        )
    if replicas * program.placement.copies == 1:
        raise ValueError(
            f"shard_optimizer=true divides the optimizer over replicas, but data_parallel.replicas={replicas}: "
            "use 2 or more, or shard_optimizer=false"
        )
    name = str(settings.optimizer.get("_target_"))
    found = locate(name, "optimizer")
    if not (isinstance(found, type) and issubclass(found, ELEMENTWISE)):
        possible = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise ValueError(
            f"shard_optimizer=true cannot divide {name}: every element must be updated by itself, as it is by "
            f"torch.optim's {possible} and classes derived from them; use one of these, or shard_optimizer=false"
        )
