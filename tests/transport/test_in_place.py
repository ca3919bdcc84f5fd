"""Messages that are read where they lie: memory that receivers map, views in order, and the same sums as ever."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workers import RUNS, joined, over_shared, over_threads

from engine.collectives import COLLECTIVES, peers
from engine.collectives.primitives.group import Group
from engine.collectives.primitives.many_to_many import all_gather_into_tensor, reduce_scatter_tensor
from engine.gradients.buckets import Reducer
from engine.transport import Edge, PeerLost, Transport
from engine.transport.shared import ends
from engine.transport.shared.memory import Regions

CPU = torch.device("cpu")
FORTH, BACK = Edge(0, 1, "forth"), Edge(1, 0, "back")


def test_a_region_is_zeros_found_by_every_part_of_it_and_given_out_again() -> None:
    regions = Regions()
    first, second = regions.allot(100_000), regions.allot(70_000)
    assert not first.any() and len(first) == 100_000
    for memory in (first, second):
        for at, nbytes in ((0, 1), (5, len(memory) - 5), (len(memory) - 1, 1)):
            found = regions.find(memory.data_ptr() + at, nbytes)
            assert found is not None and found.begin == memory.data_ptr()
    assert regions.find(torch.zeros(8).data_ptr(), 4) is None
    assert regions.find(first.data_ptr() - 1, 4) is None
    assert regions.find(first.data_ptr(), 2**20) is None
    kept, address = first[10:20].view(torch.uint8), first.data_ptr()
    first.fill_(7)
    del first
    gc.collect()
    third = regions.allot(100_000)
    assert third.data_ptr() != address, "a view of it is still in use"
    del kept
    gc.collect()
    again = regions.allot(90_000)
    assert again.data_ptr() == address and len(again) == 90_000 and not again.any()
    regions.close()
    again.fill_(1)  # what is in use stays


def test_a_large_message_out_of_shared_memory_is_not_copied_and_a_small_one_is() -> None:
    def main(transport: Transport) -> list[bool]:
        transport.open([FORTH])
        if transport.rank == 1:
            end = transport.channel(FORTH)
            shown = [end.iview(torch.empty(n, dtype=torch.uint8)) for n in (70_000, 1_000, 70_000)]
            values = []
            for view in shown:
                memory = view.wait()
                values.append((len(memory), int(memory[0])))
                view.free()
            return values
        memory = transport.memory(200_000, CPU)
        memory[:100_000], memory[100_000:] = 1, 2
        end = transport.channel(FORTH)
        works = [end.isend(part) for part in (memory[50_000:120_000], memory[:1_000], memory[100_000:170_000])]
        done = [work.done() for work in works]
        for work in works:
            work.wait()
        return [done[1], all(work.done() for work in works)]

    assert over_shared(2, main) == [[True, True], [(70_000, 1), (1_000, 1), (70_000, 2)]]


def test_a_send_in_place_is_done_when_it_was_let_go_and_not_before() -> None:
    read, checked = threading.Event(), threading.Event()

    def main(transport: Transport) -> Any:
        transport.open([FORTH])
        if transport.rank == 0:
            memory = transport.memory(2**17, CPU)
            work = transport.channel(FORTH).isend(memory)
            assert read.wait(20)
            early = work.done()
            memory.fill_(9)  # against the rules, and seen: it is the same memory
            checked.set()
            work.wait()
            return early
        view = transport.channel(FORTH).iview(torch.empty(2**17, dtype=torch.uint8))
        memory = view.wait()
        read.set()
        assert checked.wait(20)
        seen = int(memory[0])
        view.free()
        return seen

    assert over_shared(2, main) == [False, 9]


@pytest.mark.parametrize("n", [69_999, 70_001])
def test_a_size_that_differs_is_named(n: int) -> None:
    def main(transport: Transport) -> str:
        transport.open([FORTH])
        if transport.rank == 0:
            transport.channel(FORTH).isend(transport.memory(70_000, CPU))
            return ""
        view = transport.channel(FORTH).iview(torch.empty(n, dtype=torch.uint8))
        for _ in range(2):  # now and ever after
            with pytest.raises(ValueError, match=f"rank 0 sends 70000 bytes, rank 1 receives {n}"):
                view.wait()
        return "named"

    assert over_shared(2, main)[1] == "named"


def test_a_peer_that_is_gone_ends_a_view() -> None:
    def main(transport: Transport) -> str:
        transport.open([FORTH])
        if transport.rank == 0:
            transport.abort()
            return ""
        with pytest.raises(PeerLost, match="receive of 70000 bytes on channel forth from rank 0 to rank 1"):
            transport.channel(FORTH).iview(torch.empty(70_000, dtype=torch.uint8)).wait()
        return "lost"

    assert over_shared(2, main)[1] == "lost"


def test_what_is_posted_behind_a_view_waits_for_it() -> None:
    """A rank that waits for a send of its own fills posted receives meanwhile, but nothing past a view."""

    def main(transport: Transport) -> list[int]:
        transport.open([FORTH, BACK])
        there, back = (FORTH, BACK) if transport.rank == 0 else (BACK, FORTH)
        sender, receiver = transport.channel(there), transport.channel(back)
        memory, into = transport.memory(2**17, CPU), torch.zeros(2**17, dtype=torch.uint8)
        memory.fill_(transport.rank + 1)
        view, after = receiver.iview(memory), receiver.irecv(into)
        works = [sender.isend(memory), sender.isend(memory)]
        transport.fill_posted()  # type: ignore[attr-defined]
        assert not after.done()
        first = int(view.wait()[3])
        view.free()
        after.wait()
        for work in works:
            work.wait()
        return [first, int(into[5])]

    assert over_shared(2, main) == [[2, 2], [1, 1]]


@pytest.mark.parametrize("name", ["ring", "double_ring", "halving_doubling", "tree", "recursive_doubling"])
@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_bitwise_those_of_copied_messages(
    name: str, world: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes around the bound below which a message is copied, and around that of a piece; twice over."""
    monkeypatch.setattr(ends, "IN_PLACE_BYTES", 2**10)
    monkeypatch.setattr(peers, "PIECE_BYTES", 2**12)
    kind = COLLECTIVES[name]
    generator = torch.Generator().manual_seed(1)
    sizes = [1, world * 2**10 // dtype.itemsize, world * 2**12 // dtype.itemsize + 3, 20_011]
    parts = [[(torch.randn(n, generator=generator) * 1e3).to(dtype) for _ in range(world)] for n in sizes]

    def main(transport: Transport) -> list[Tensor]:
        collective, found = joined(transport, kind), []
        for each in parts:
            memory = collective.peers.memory(max(len(each[0]), 2**17), dtype, CPU)[: len(each[0])]
            for _ in range(2):
                memory.copy_(each[transport.rank])
                collective.all_reduce(memory)
                found.append(memory.clone())
        return found

    expected = over_threads(world, main)
    for rank in over_shared(world, main):
        for a, b in zip(rank, expected[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_so_are_scattered_sums_and_what_is_gathered(world: int, dtype: torch.dtype) -> None:
    n = world * 40_000
    data = [torch.randn(n, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(world)]

    def main(transport: Transport) -> tuple[Tensor, Tensor]:
        transport.open(Group.edges(range(world), "g"))
        group = Group(transport, range(world), "g")
        memory = group.peers.memory(n, dtype, CPU)
        memory.copy_(data[transport.rank])
        own = memory.view(world, -1)[transport.rank]
        reduce_scatter_tensor(own, memory, group=group)
        part = own.clone()
        all_gather_into_tensor(memory, own, group=group)
        return part, memory.clone()

    expected = over_threads(world, main)
    for found, wanted in zip(over_shared(world, main), expected, strict=True):
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def test_buckets_lie_in_shared_memory_and_a_gradient_may_be_changed_behind_a_step() -> None:
    """Clipping writes into .grad while nobody reads it any more: what others hold stays what was reduced."""
    steps = 5

    def main(transport: Transport) -> tuple[bool, list[Tensor]]:
        collective = joined(transport, COLLECTIVES["ring"])
        weight = nn.Parameter(torch.zeros(300, 300))
        reducer = Reducer([("weight", weight)], collective, 2**20)
        found = []
        for step in range(steps):
            weight.grad = torch.full_like(weight, float(step + transport.rank))
            reducer.launch()
            reducer.wait()
            assert weight.grad is not None
            found.append(weight.grad.clone())
            weight.grad.mul_(transport.rank - 5.0)
        regions = getattr(transport, "regions", None)
        return regions is None or regions.find(weight.grad.data_ptr(), weight.grad.nbytes) is not None, found

    for run in ("threads", "shared"):
        for shared, found in RUNS[run](3, main):
            assert shared
            for step, grad in enumerate(found):
                assert torch.equal(grad, torch.full((300, 300), 3.0 * step + 3))
