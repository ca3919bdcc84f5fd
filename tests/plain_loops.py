"""A small model, its data, and ranks for plain training loops with `engine.distributed`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore
from workers import over_threads

from engine.distributed import World

STEPS, ROWS = 5, 12
DATA = torch.randn(STEPS, ROWS, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def on_ranks(size: int, main: Callable[[World], Any], patience_s: float = 10.0, timeout_s: float = 20.0) -> list[Any]:
    store = HashStore()
    return over_threads(size, lambda transport: main(World(transport, store, patience_s)), timeout_s)


BUILDING = threading.Lock()  # torch's generator belongs to the process


def built(seed: int = 0) -> nn.Module:
    with BUILDING:
        return model(seed)
