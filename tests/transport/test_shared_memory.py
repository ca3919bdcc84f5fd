"""Shared memory: what is particular to it. What it has in common with other transports is in test_transport.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import run_threads, settings
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore
from workers import over_shared, pair

from engine.job import Job
from engine.settings import Eval, Settings
from engine.training import connect
from engine.transport import Edge, PeerTimeout, Transport
from engine.transport.shared import SharedMemoryTransport
from engine.transport.shared.segments import LEAST_BYTES, MOST_BYTES, Mapped, Segments, size_of
from engine.transports import shared_memory_missing

pytestmark = pytest.mark.skipif(bool(shared_memory_missing()), reason="needs Linux with memfd_create and eventfd")


class Both:
    """Both sides of a channel's memory in one process."""

    def __init__(self) -> None:
        self.mapped = Mapped()
        self.sent = Segments(lambda fd, nbytes: self.mapped.add(os.dup(fd), nbytes))


@given(st.lists(st.integers(0, 3 * LEAST_BYTES), min_size=1, max_size=40))
def test_slots_are_seen_by_both_sides_and_never_overlap(sizes: list[int]) -> None:
    both = Both()
    slots = [(nbytes, both.sent.slot(nbytes)) for nbytes in sizes]
    for value, (_, slot) in enumerate(slots):
        slot.memory.fill_(value)
    for value, (nbytes, slot) in enumerate(slots):
        assert slot.memory.numel() == size_of(nbytes) >= nbytes
        seen = torch.full((nbytes,), 255, dtype=torch.uint8)
        both.mapped.copy(slot.segment, slot.offset, seen, memoryview(seen.numpy()))
        assert (seen == value).all()
    assert len(both.mapped) <= 3 * (1 + len(sizes).bit_length())  # few segments however many slots


def test_a_slot_given_back_is_the_next_one() -> None:
    both = Both()
    first = both.sent.slot(100)
    both.sent.give_back(first)
    assert both.sent.slot(LEAST_BYTES) is first and len(both.mapped) == 1


def test_large_slots_have_a_segment_each() -> None:
    both = Both()
    for count in range(1, 4):
        both.sent.slot(MOST_BYTES)  # never touched: takes no memory
        assert len(both.mapped) == count


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, LEAST_BYTES + 1), (LEAST_BYTES, 1)])
def test_a_peer_cannot_point_outside_of_what_it_shared(offset: int, nbytes: int) -> None:
    both = Both()
    both.sent.slot(1)
    with pytest.raises(ValueError, match=rf"{nbytes} bytes at {offset} of a segment of {LEAST_BYTES}"):
        both.mapped.copy(0, offset, torch.zeros(nbytes, dtype=torch.uint8), memoryview(bytearray(nbytes)))


def test_a_segment_of_another_size_than_announced_is_refused() -> None:
    fd = os.memfd_create("x")
    os.ftruncate(fd, 10)
    with pytest.raises(ValueError, match="a segment of 10 bytes, announced as 20"):
        Mapped().add(fd, 20)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_the_receiver_cannot_shrink_what_it_was_handed() -> None:
    handed: list[int] = []
    Segments(lambda fd, _: handed.append(os.dup(fd))).slot(1)
    with pytest.raises(PermissionError):
        os.ftruncate(handed[0], 0)
    os.close(handed[0])


@pytest.mark.parametrize("length", [5, 3], ids=["buffer longer", "buffer shorter"])
def test_a_size_that_differs_is_named_and_nothing_is_filled(length: int) -> None:
    buffer = torch.full((length,), 9.0)

    def main(transport: Transport) -> None:
        out, inn = pair(transport)
        if transport.rank == 0:
            out.isend(torch.zeros(4))
        else:
            inn.irecv(buffer).wait()

    with pytest.raises(ValueError, match=rf"channel F from .*: rank 0 sends 16 bytes, rank 1 receives {4 * length}"):
        over_shared(2, main)
    assert (buffer == 9).all()


def test_a_packet_is_done_with_when_it_was_taken_and_not_before() -> None:
    """And whoever waits for that fills its own posted receives meanwhile, or two such would wait for ever."""

    def main(transport: Transport) -> list[float]:
        out, inn = pair(transport)
        memory = out.empty(4, torch.device("cpu"))
        memory.copy_(torch.full((4,), transport.rank + 1, dtype=torch.uint8))
        send = out.isend(memory)
        early = send.done()
        buffer = torch.zeros(4, dtype=torch.uint8)
        receive = inn.irecv(buffer)
        send.wait()
        assert send.done()
        receive.wait()
        return [float(early and not send.done()), *buffer.tolist()]

    assert over_shared(2, main) == [[0.0, 2, 2, 2, 2], [0.0, 1, 1, 1, 1]]


def test_sends_reuse_their_slots() -> None:
    def main(transport: Transport) -> int:
        out, inn = pair(transport)
        buffer = torch.zeros(5000, dtype=torch.uint8)
        for _ in range(50):
            out.isend(torch.ones(5000, dtype=torch.uint8))
            inn.irecv(buffer).wait()
        return len(inn._mapped)

    assert max(over_shared(2, main)) <= 2


def descriptors() -> int:
    """Open in this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
def test_no_descriptor_is_left_open() -> None:
    def main(transport: Transport) -> None:
        out, inn = pair(transport)
        sends = [out.isend(torch.ones(10**k)) for k in range(6)]
        for k in range(6):
            inn.irecv(torch.zeros(10**k)).wait()
        for send in sends:
            send.wait()

    over_shared(2, main)
    before = descriptors()
    for _ in range(3):
        over_shared(2, main)
    assert descriptors() <= before


def test_connecting_is_limited_in_time_on_both_sides() -> None:
    for edge, peer in ((Edge(0, 1, "F"), 1), (Edge(1, 0, "B"), 1)):
        transport = SharedMemoryTransport(0, 2, HashStore(), timeout_s=0.3)
        with pytest.raises(PeerTimeout, match=r"connecting channel .*peer 1: nothing for 0.3 s") as caught:
            transport.open([edge])
        assert caught.value.peer == peer


def test_a_stranger_is_not_taken_for_a_peer() -> None:
    def main(transport: Transport) -> None:
        transport.open([Edge(0, 1, "F")] if transport.rank == 0 else [Edge(0, 1, "G")])

    with pytest.raises(ValueError, match=r"a peer opens 0 1 F, which is none of .*channel G from"):
        over_shared(2, main, timeout_s=2)


def test_the_transport_that_a_run_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Settings(device="cpu")
    assert connect.transport_of(base).name == "shared_memory"
    assert connect.transport_of(replace(base, transport="gloo")).name == "gloo"
    for changed, why, taken in (
        (replace(base, launch="threads"), "launch=threads", "threads"),
        (replace(base, device="cuda"), "GPUs", "nccl"),
    ):
        assert connect.transport_of(changed).name == taken
        with pytest.raises(ValueError, match=f"=shared_memory.*{why}.*use transport=auto, which takes {taken}"):
            connect.transport_of(replace(changed, transport="shared_memory"))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert connect.transport_of(base).name == "gloo"
    with pytest.raises(ValueError, match="between hosts"):
        connect.transport_of(replace(base, transport="shared_memory"))


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "replicas"),
    [("gpipe", 3, 8, 1), ("1f1b", 4, 8, 1), ("interleaved_1f1b", 2, 4, 1), ("zb_v", 2, 6, 1), ("1f1b", 2, 5, 2)],
)
@pytest.mark.slow(keep=4)
def test_training_is_bitwise_that_of_threads(schedule: str, ranks: int, microbatches: int, replicas: int) -> None:
    """Several messages of a channel under way at once, packets used again, an evaluation in between."""
    wanted = settings(schedule, ranks, microbatches, replicas, eval=Eval(every=2, batch_size=12))
    chunks = 2 if schedule == "interleaved_1f1b" else None
    wanted = replace(wanted, schedule={"name": schedule, "chunks": chunks})
    wanted = replace(wanted, data=wanted.data | {"evaluation": {"samples": 20}})
    store, made = HashStore(), []

    def connect(job: Job) -> Callable[[int], Transport]:
        made.extend(SharedMemoryTransport(rank, job.world, store, 20.0) for rank in range(job.world))
        return made.__getitem__

    expected, ran = run_threads(wanted), run_threads(wanted, connect=connect)
    states = ran.state(), expected.state()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert ran.losses() == expected.losses() and len(ran.losses()) == 3
    assert len(ran.of("evaluation")) == len(expected.of("evaluation")) > 0
    assert all(not worker.links.outstanding for worker in ran.workers.values())
    for transport in made:
        transport.close()
