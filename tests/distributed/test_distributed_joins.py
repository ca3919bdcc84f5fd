"""Ranks that run out of samples: in every epoch, any of them; and what a joined rank must not be asked for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loops import DATA, built, on_ranks, sgd
from torch import Tensor
from workers import over_gloo, over_shared, over_threads

from engine import collectives
from engine.distributed import DistributedOptimizer, World, broadcast_optimizer_state, broadcast_parameters

EPOCHS = [(2, 1), (0, 3), (1, 0), (0, 0), (0, 0), (2, 2), (3, 0)]  # batches of either rank, epoch by epoch


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_join_behind_every_epoch(order: tuple[int, int]) -> None:
    """The gradients of those that have samples are equal, so all is as in one process."""

    def main(world: World) -> tuple[list[int], dict[str, Tensor], Any]:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), world=world)
        lasts = []
        for counts in EPOCHS:
            for batch in DATA[: counts[order[world.rank]]]:
                optimizer.zero_grad()
                net(batch).square().mean().backward()
                optimizer.step()
            lasts.append(optimizer.join())
        return lasts, net.state_dict(), optimizer.state_dict()

    net = built()
    optimizer = sgd(net)
    for counts in EPOCHS:
        for batch in DATA[: max(counts)]:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
    longest = [[counts[order[0]], counts[order[1]]] for counts in EPOCHS]
    for lasts, state, _ in on_ranks(2, main):
        assert lasts == [each.index(max(each)) for each in longest]
        for name, value in net.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_a_rank_may_be_alone_and_join_every_epoch() -> None:
    def main(world: World) -> list[int]:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), world=world)
        found = []
        for _ in range(3):
            net(DATA[0]).mean().backward()
            optimizer.step()
            found += [optimizer.join(), optimizer.join()]
        return found

    assert on_ranks(1, main) == [[0] * 6]


def test_any_of_three_ranks_may_have_nothing_in_any_epoch() -> None:
    given = list(itertools.product((0, 1), repeat=3))

    def main(world: World) -> tuple[list[int], float]:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), world=world)
        lasts = []
        for counts in given:
            for batch in DATA[: counts[world.rank]]:
                net(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            lasts.append(optimizer.join())
        return lasts, float(net[0].weight.detach().sum())

    results = on_ranks(3, main)
    assert [lasts for lasts, _ in results] == [[counts.index(max(counts)) for counts in given]] * 3
    assert len({weight for _, weight in results}) == 1


# -- calls that do not fit ---------------------------------------------------------------------------------------------

Call = Callable[[World, Any, Any], object]
OTHERS: dict[str, Call] = {
    "broadcast_parameters()": lambda world, net, _: broadcast_parameters(net.state_dict(), world=world),
    "broadcast_optimizer_state()": lambda world, _, optimizer: broadcast_optimizer_state(optimizer, world=world),
    "all_reduce of [3] float32, sum, by ring": lambda world, *_: collectives.all_reduce(
        torch.zeros(3), group=world.group
    ),
    "barrier": lambda world, *_: collectives.barrier(group=world.group),
    "DistributedOptimizer(), number 2": lambda world, net, _: DistributedOptimizer(sgd(net), world=world),
}
END = "takes part in steps of that optimizer only; call anything else before, or after all ranks have joined"


def said(run: Any, joins_first: bool, call: Call) -> list[str]:
    """What either rank says where rank 1 joins and rank 0 calls something else; either may be the first."""
    from torch.distributed import HashStore

    store, first = HashStore(), threading.Event()

    def main(transport: Any) -> str:
        world = World(transport, store, 10.0)
        net = built()
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), world=world)
        net(DATA[0]).mean().backward()
        optimizer.step()
        joins = world.rank == 1
        if joins != joins_first:
            assert first.wait(30)
        threading.Timer(0.3, first.set).start()
        with pytest.raises(RuntimeError) as raised:
            optimizer.join() if joins else call(world, net, optimizer)
        transport.abort()  # as where the process ends
        return str(raised.value)

    return run(2, main, 60.0)


@pytest.mark.parametrize("joins_first", [True, False])
@pytest.mark.parametrize("words", OTHERS)
@pytest.mark.slow(keep=3)
def test_a_joined_rank_and_another_call_end_soon_and_name_each_other(words: str, joins_first: bool) -> None:
    caller, joined = said(over_threads, joins_first, OTHERS[words])
    assert caller.startswith(f"rank 0 waits in {words}, but rank(s) 1 called join() of optimizer 1: "), caller
    assert joined.startswith(f"rank 1 waits in join() of optimizer 1, but rank(s) 0 called {words}: "), joined
    assert caller.endswith(END) and joined.endswith(END)


@pytest.mark.parametrize("run", [over_gloo, over_shared], ids=["gloo", "shared"])
def test_between_processes_too(run: Any) -> None:
    words = "broadcast_parameters()"
    caller, joined = said(run, False, OTHERS[words])
    assert caller.startswith(f"rank 0 waits in {words}, but rank(s) 1 called join() of optimizer 1: "), caller
    assert joined.startswith(f"rank 1 waits in join() of optimizer 1, but rank(s) 0 called {words}: "), joined


def test_two_optimizers_stepped_in_different_orders_name_each_other() -> None:
    def main(world: World) -> str:
        nets = [built(), built()]
        optimizers = [DistributedOptimizer(sgd(net), world=world) for net in nets]
        first = optimizers[world.rank]
        with pytest.raises(RuntimeError) as raised:
            first.step()
        world.transport.abort()
        return str(raised.value)

    zero, one = on_ranks(2, main)
    assert zero == (
        "rank 0 waits in step() of optimizer 1, but rank(s) 1 called step() of optimizer 2: all ranks must make the "
        "same calls in the same order"
    )
    assert one.startswith("rank 1 waits in step() of optimizer 2, but rank(s) 0 called step() of optimizer 1")
