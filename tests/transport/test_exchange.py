"""Short sums among processes of one host. What they have in common with other transports is in test_transport.py."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from workers import HANG_S, over_shared

from engine.errors import ExhaustedError
from engine.transport import PeerLost, PeerTimeout, Transport
from engine.transport.c10d import REDUCIBLE
from engine.transport.shared import SharedMemoryTransport, exchange
from engine.transport.shared.exchange import SHORT_BYTES
from engine.transports import shared_memory_missing

pytestmark = pytest.mark.skipif(bool(shared_memory_missing()), reason="needs Linux with memfd_create and eventfd")

LENGTHS = [1, SHORT_BYTES // 8, SHORT_BYTES // 8 + 1, 100_000]


def part(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 10
    return drawn.to(dtype)


def summed(transport: Transport, value: torch.Tensor) -> torch.Tensor:
    transport.all_reduce(value, list(range(transport.world)), "g").wait()
    return value


def opened(transport: Transport) -> Transport:
    transport.open_group(list(range(transport.world)), "g")
    return transport


@pytest.mark.parametrize("dtype", sorted(REDUCIBLE, key=str), ids=str)
def test_all_members_add_in_rank_order(dtype: torch.dtype) -> None:
    """Short parts, and those that go as a descriptor; bit for bit."""

    def main(transport: Transport) -> list[torch.Tensor]:
        opened(transport)
        return [summed(transport, part(transport.rank, length, dtype)) for length in LENGTHS]

    wanted = []
    for length in LENGTHS:
        first, second, third = (part(rank, length, dtype) for rank in range(3))
        wanted.append((first + second) + third)
    for totals in over_shared(3, main):
        for total, expected in zip(totals, wanted, strict=True):
            assert total.dtype is dtype and torch.equal(total, expected)


def test_a_tensor_of_any_form_gets_its_sum() -> None:
    def main(transport: Transport) -> list[Any]:
        opened(transport)
        scalar = torch.tensor(transport.rank + 1.0, requires_grad=True)
        whole = torch.full((2, 6), 1.0 + transport.rank)
        summed(transport, whole[:, ::2])
        return [summed(transport, scalar).item(), whole.tolist()]

    for rank, (scalar, whole) in enumerate(over_shared(2, main)):
        assert scalar == 3.0 and whole == [[3.0, 1.0 + rank] * 3] * 2


def test_a_tensor_is_the_callers_again_once_its_sum_has_started() -> None:
    def main(transport: Transport) -> float:
        opened(transport)
        value = torch.ones(1)
        work = transport.all_reduce(value, [0, 1], "g")
        value.fill_(7)
        assert not work.done()
        work.wait()
        assert work.done()
        return float(value)

    assert over_shared(2, main) == [2.0, 2.0]


@pytest.mark.parametrize(("count", "length"), [(2000, 1), (300, SHORT_BYTES // 8), (300, SHORT_BYTES)])
def test_to_start_never_blocks(count: int, length: int) -> None:
    """Far more than a socket has room for; the other member starts only when all of them have been started."""
    all_started = threading.Event()

    def main(transport: Transport) -> list[float]:
        opened(transport)
        if transport.rank == 1:
            assert all_started.wait(HANG_S)
        values = [torch.full((length,), float(k), dtype=torch.float64) for k in range(count)]
        works = [transport.all_reduce(value, [0, 1], "g") for value in values]
        all_started.set()
        for work in works:
            work.wait()
        assert all((value == value[0]).all() for value in values)
        return [float(value[0]) for value in values]

    assert over_shared(2, main) == [[2.0 * k for k in range(count)]] * 2


def test_a_member_that_left_is_named_and_what_it_sent_counts() -> None:
    """It has started one sum and awaits none: parts of the other lie unread in its socket when it closes."""
    started, closed = threading.Event(), threading.Event()

    def main(transport: Transport) -> tuple[float, int | None]:
        opened(transport)
        value = torch.ones(1)
        if transport.rank == 1:
            transport.all_reduce(value, [0, 1], "g")
            assert started.wait(HANG_S)
            transport.close()
            closed.set()
            return 0.0, None
        first = transport.all_reduce(value, [0, 1], "g")
        second = transport.all_reduce(torch.ones(1), [0, 1], "g")
        started.set()
        assert closed.wait(HANG_S)
        first.wait()
        third = transport.all_reduce(torch.ones(1), [0, 1], "g")
        for work in (second, third):
            with pytest.raises(PeerLost, match=r"all-reduce g over ranks \[0, 1\], peer 1: the peer closed") as caught:
                work.wait()
        return float(value), caught.value.peer

    assert over_shared(2, main)[0] == (2.0, 1)


@pytest.mark.slow
def test_the_silent_member_is_named() -> None:
    over = threading.Event()

    def main(transport: Transport) -> int | None:
        opened(transport)
        if transport.rank == 1:
            assert over.wait(HANG_S)
            return None
        with pytest.raises(
            PeerTimeout, match=r"all-reduce g over ranks \[0, 1, 2\], peer 1: nothing for 1 s"
        ) as caught:
            summed(transport, torch.ones(1))
        if transport.rank == 0:
            over.set()
        return caught.value.peer

    assert over_shared(3, main, timeout_s=1) == [1, None, 1]


def test_abort_ends_a_sum_that_is_awaited_and_every_later_one() -> None:
    quiet = threading.Event()

    def main(transport: Transport) -> None:
        opened(transport)
        if transport.rank == 1:
            assert quiet.wait(HANG_S)
            return
        threading.Timer(0.1, transport.abort).start()
        for _ in range(2):
            with pytest.raises(PeerLost, match="peer 1: this rank was aborted"):
                summed(transport, torch.ones(1))
        quiet.set()

    over_shared(2, main)


def test_parts_of_different_sizes_are_named_on_every_member() -> None:
    def main(transport: Transport) -> str:
        opened(transport)
        with pytest.raises(ValueError) as caught:
            summed(transport, torch.zeros(2 + transport.rank))
        return str(caught.value)

    first, second = over_shared(2, main)
    assert first == "all-reduce g over ranks [0, 1]: rank 1 passes 12 bytes, rank 0 passes 8"
    assert second == "all-reduce g over ranks [0, 1]: rank 0 passes 8 bytes, rank 1 passes 12"


def test_what_the_backend_does_not_add_is_not_added_here() -> None:
    with pytest.raises(ValueError, match=r"does not add torch\.bool"):
        over_shared(2, lambda transport: summed(opened(transport), torch.ones(1) > 0))


def test_connecting_is_limited_in_time_on_both_sides() -> None:
    for rank, peer in ((0, 1), (1, 0)):
        transport = SharedMemoryTransport(rank, 2, HashStore(), timeout_s=0.3)
        said = rf"connecting group g of ranks \[0, 1\], peer {peer}: nothing for 0.3 s"
        with pytest.raises(PeerTimeout, match=said) as caught:
            opened(transport)
        assert caught.value.peer == peer


@pytest.mark.slow
def test_no_descriptor_is_left_open() -> None:
    def main(transport: Transport) -> None:
        opened(transport)
        for length in LENGTHS:
            summed(transport, torch.ones(length))
        for _ in range(300):  # kept where the sockets are full, and never read
            transport.all_reduce(torch.ones(SHORT_BYTES), [0, 1], "g")

    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    over_shared(2, main)
    before = descriptors()
    for _ in range(3):
        over_shared(2, main)
    assert descriptors() <= before


def test_a_descriptor_that_the_system_dropped_is_named() -> None:
    message, fd = exchange._packed(memoryview(bytes(SHORT_BYTES + 1)))
    assert fd is not None
    assert exchange._unpacked(message, [fd]) == bytes(SHORT_BYTES + 1)
    with pytest.raises(ExhaustedError, match=rf"no {SHORT_BYTES + 1} bytes of shared memory .*: Too many open files"):
        exchange._unpacked(message, [])
