"""Data parallelism for a training loop that knows nothing else of the engine: four lines under torchrun.

    import engine

    mine = samples[engine.rank() :: engine.size()]
    optimizer = engine.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    engine.broadcast_parameters(model.state_dict())

The names are Horovod's (Sergeev & Del Balso 2018, arXiv 1802.05799); the reductions are those of
`engine.collectives`. Without a launcher the process is alone, and the same loop trains as it always did.
"""

from __future__ import annotations

from engine.distributed.broadcast import broadcast_optimizer_state, broadcast_parameters
from engine.distributed.optimizer import DistributedOptimizer
from engine.distributed.threads import run_threads
from engine.distributed.world import World, init, rank, shutdown, size
from engine.gradients.compression import Compression

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "World",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "rank",
    "run_threads",
    "shutdown",
    "size",
]
