"""One rank of a plain data-parallel loop, under torchrun: `-m benchmarks.data_parallel_worker MODEL WAY FOLDER`.

WAY is none (no exchange), ddp (torch's DistributedDataParallel) or distributed_optimizer (ours). Rank 0 writes the
times at which steps ended to FOLDER/ends.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import engine
from benchmarks.data_parallel import case_of
from benchmarks.layers import batch_of, mean_loss, optimizer_of, whole


def train(model: str, way: str, rank: int, size: int) -> list[float]:
    """The ends of the steps, each on this rank's rows of the same batch."""
    job = case_of(model, size).job
    network: torch.nn.Module = whole(job)
    criterion = mean_loss(job)
    optimizer = optimizer_of(job, network)
    if way == "ddp":
        dist.init_process_group("gloo")
        network = torch.nn.parallel.DistributedDataParallel(network)
    elif way == "distributed_optimizer":
        optimizer = engine.DistributedOptimizer(optimizer, network.named_parameters())
    inputs, targets = (each[rank::size] for each in batch_of(job))
    ends = []
    for _ in range(case_of(model, size).steps):
        optimizer.zero_grad()
        criterion(network(inputs), targets).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    if way == "ddp":
        dist.destroy_process_group()
    return ends


def main(model: str, way: str, folder: Path) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ends = train(model, way, rank, size)
    if rank == 0:
        (folder / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
