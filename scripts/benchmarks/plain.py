"""One plain process without any pipeline: `python -m benchmarks.plain CASE THREADS FILE` (0: torch's own choice)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.cases import CASES, Case
from benchmarks.layers import batch_of, mean_loss, optimizer_of, whole


def train(case: Case) -> list[float]:
    """Train on whole batches; the times at which steps ended."""
    module = whole(case.job)
    optimizer, criterion = optimizer_of(case.job, module), mean_loss(case.job)
    inputs, targets = batch_of(case.job)
    ends = []
    for _ in range(case.steps):
        optimizer.zero_grad()
        loss = criterion(module(inputs), targets)
        loss.backward()
        optimizer.step()
        loss.item()
        ends.append(time.perf_counter())
    return ends


if __name__ == "__main__":
    name, threads, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if threads:
        torch.set_num_threads(threads)
    file.write_text(json.dumps({"ends": train(CASES[name]), "threads": torch.get_num_threads()}))
