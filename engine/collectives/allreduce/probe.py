"""What a link and an addition cost on the transport at hand: α, β and γ, measured by all members together.

    α   a small message to the successor while one comes from the predecessor, as in a step of a ring
    β   the same with a large one, less α
    γ   the addition of a large tensor

The best of several tries counts: disturbances only add. All members end with the same three numbers, the largest of
each, so that what they choose by them is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.collectives.allreduce.costs import LinkCosts
from engine.collectives.allreduce.ring import Ring
from engine.collectives.ops import ReduceOp
from engine.collectives.peers import PIECE_BYTES, Peers, wait_all

SMALL_BYTES, LARGE_BYTES = 64, PIECE_BYTES
SMALL_TRIES, LARGE_TRIES = 30, 8


def measure(ring: Ring) -> LinkCosts:
    """Measure the cost of a link and of an addition; all members call at once, and it takes some milliseconds.

    `ring` has two members or more.
    """
    peers, device = ring.peers, ring.transport.device
    small, large = (torch.zeros(2, nbytes, dtype=torch.uint8, device=device) for nbytes in (SMALL_BYTES, LARGE_BYTES))
    numbers = torch.zeros(2, LARGE_BYTES // 4, device=device)
    alpha = _best(SMALL_TRIES, lambda: _shift(peers, small[0], small[1]), device)
    whole = _best(LARGE_TRIES, lambda: _shift(peers, large[0], large[1]), device)
    gamma = _best(LARGE_TRIES, lambda: numbers[0].add_(numbers[1]), device) / LARGE_BYTES
    agreed = torch.tensor([alpha, max(0.0, whole - alpha) / LARGE_BYTES, gamma], dtype=torch.float64, device=device)
    ring.all_reduce(agreed, ReduceOp.MAX)
    return LinkCosts(*agreed.tolist())


def _shift(peers: Peers, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """One step around: to the successor, from the predecessor."""
    arriving = peers.recv((peers.position - 1) % peers.size, theirs)
    wait_all([peers.send((peers.position + 1) % peers.size, ours), arriving])


def _best(tries: int, call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of `tries` calls."""
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
