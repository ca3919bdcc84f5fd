"""Ranks as threads of one process, as a launcher's ranks are processes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

import engine
from engine.transport import PeerLost


def test_each_thread_is_a_rank_of_its_own() -> None:
    """Results come in the order of the ranks, and the caller is what it was."""

    def loop(offset: int) -> tuple[int, int, str]:
        return engine.rank() + offset, engine.size(), threading.current_thread().name

    assert engine.run_threads(3, loop, 10) == [(10 + rank, 3, f"rank {rank}") for rank in range(3)]
    assert engine.run_threads(1, engine.size) == [1]
    with pytest.raises(ValueError, match=r"within engine.run_threads.* ranks have joined"):
        engine.run_threads(2, engine.init)
    before = threading.active_count()
    engine.run_threads(3, engine.rank)
    assert threading.active_count() == before


def test_what_ranks_draw_before_they_meet_is_their_own() -> None:
    """torch's generator is one for all threads: each has it to itself until it asks for the others."""

    def loop() -> Tensor:
        torch.manual_seed(5)
        drawn = []
        for _ in range(3):
            time.sleep(0.01)
            drawn.append(torch.rand(4))
        engine.rank()
        return torch.cat(drawn)

    first, *others = engine.run_threads(3, loop)
    assert all(torch.equal(first, other) for other in others)


def test_a_plain_loop_is_data_parallel_in_threads_too() -> None:
    def loop(data: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1).double()
        optimizer = engine.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        model(data[engine.rank() :: engine.size()]).square().mean().backward()
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected,) = engine.run_threads(1, loop, data)
    for found in engine.run_threads(2, loop, data):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_whoever_waits_for_a_rank_that_failed_is_freed() -> None:
    """The first true error is raised, not what the others saw of it."""
    freed: list[type[BaseException]] = []

    def loop() -> None:
        if engine.rank() == 1:
            raise ArithmeticError("out of luck")
        try:
            engine.broadcast_parameters([("a", torch.zeros(1))])
        except BaseException as error:
            freed.append(type(error))
            raise

    with pytest.raises(ArithmeticError, match="out of luck"):
        engine.run_threads(3, loop)
    assert freed == [PeerLost, PeerLost]


def test_a_rank_that_ends_without_the_others_is_named() -> None:
    begun: list[str] = []

    def loop() -> None:
        begun.append(threading.current_thread().name)
        if len(begun) != 2:
            engine.rank()

    with pytest.raises(PeerLost, match="ended before it met the others") as raised:
        engine.run_threads(3, loop)
    assert raised.value.peer == 1
