"""Which device a rank computes on."""

from __future__ import annotations

import os

import torch

from engine.environment import seat_of
from engine.job import Job


def device_of(job: Job, rank: int) -> torch.device:
    """The device of a world rank: one GPU per rank of a host; threads may share them."""
    if job.settings.device != "cuda":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if job.settings.launch == "threads":
        return torch.device("cuda", rank % gpus)
    return torch.device("cuda", seat_of(rank, job.world, os.environ, gpus).gpu(gpus))
