"""A pipeline-parallel training engine: schedules as data, proven before they run, measured while they run.

For a training loop of one's own there are `engine.Pipeline` (a model over several ranks) and the names of
`engine.distributed` (data parallelism). They are loaded at first use, so that the command line can refuse a mistake
without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.distributed import (
        Compression,
        DistributedOptimizer,
        broadcast_optimizer_state,
        broadcast_parameters,
        init,
        rank,
        run_threads,
        shutdown,
        size,
    )
    from engine.pipeline.pipeline import Pipeline

__version__ = "0.2.0"
__all__ = [
    "Compression",
    "DistributedOptimizer",
    "Pipeline",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "rank",
    "run_threads",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from engine.pipeline.pipeline import Pipeline

        return Pipeline
    if name in __all__:
        from engine import distributed

        return getattr(distributed, name)
    raise AttributeError(f"module engine has no attribute {name}")
