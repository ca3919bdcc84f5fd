"""Transports: order, any dtype, time limits, abort. What is true of one must be true of the other."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import HANG_S, RUNS, Run, over_gloo, over_threads, pair, processes

from engine.transport import Edge, PeerLost, PeerTimeout, Transport
from engine.transport.gloo import GlooTransport
from engine.transport.threads import ThreadHub

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip

both = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
messages = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6)


def content(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits of any dtype; bools are 0 or 1."""
    numbers = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=gen(seed))
    return (numbers % 2 == 1)[..., 0] if dtype == torch.bool else numbers.view(dtype)[..., 0].clone()


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@both
@settings(max_examples=15)
@given(sent=messages, posted_ahead=st.integers(0, 6))
def test_the_kth_send_meets_the_kth_receive_bit_for_bit(run: Run, sent: list[Any], posted_ahead: int) -> None:
    def main(transport: Transport) -> list[bytes]:
        out, inn = pair(transport)
        buffers = [torch.full(shape, 0, dtype=torch.uint8).to(dtype) for shape, dtype in sent]
        works = [inn.irecv(buffer) for buffer in buffers[:posted_ahead]]
        sends = [out.isend(content(*what, 10 * k + transport.rank)) for k, what in enumerate(sent)]
        works += [inn.irecv(buffer) for buffer in buffers[posted_ahead:]]
        for work in (*works, *sends):
            work.wait()
            work.wait()  # a second time changes nothing
        assert out.bytes_sent == sum(buffer.nbytes for buffer in buffers) and inn.bytes_sent == 0
        return [bits(buffer) for buffer in buffers]

    received = run(2, main)
    for rank in (0, 1):
        expected = [bits(content(*what, 10 * k + 1 - rank)) for k, what in enumerate(sent)]
        assert received[rank] == expected


@both
def test_equal_sizes_arrive_in_order(run: Run) -> None:
    def main(transport: Transport) -> list[float]:
        out, inn = pair(transport)
        sends = [out.isend(torch.tensor([float(k)])) for k in range(20)]
        buffers = torch.zeros(20, 1)
        works = [inn.irecv(row) for row in buffers]
        for work in (*works, *sends):
            work.wait()
        return buffers.flatten().tolist()

    assert run(2, main) == [list(map(float, range(20)))] * 2


@both
def test_neighbours_that_both_send_first_do_not_block(run: Run) -> None:
    def main(transport: Transport) -> bool:
        out, inn = pair(transport)
        send = out.isend(torch.full((2**22,), float(transport.rank)))
        buffer = torch.empty(2**22)
        inn.irecv(buffer).wait()
        send.wait()
        return bool((buffer == 1 - transport.rank).all())

    assert run(2, main) == [True, True]


@both
@pytest.mark.slow(keep=1)
def test_dropped_handles_keep_their_tensors(run: Run) -> None:
    def main(transport: Transport) -> list[float]:
        out, inn = pair(transport)
        for k in range(64):
            out.isend(torch.full((3000,), float(k)))
        gc.collect()
        torch.full((64, 3000), -1.0)  # would take the place of what was let go
        got = []
        for _ in range(64):
            buffer = torch.empty(3000)
            inn.irecv(buffer).wait()
            assert (buffer == buffer[0]).all()
            got.append(float(buffer[0]))
        return got

    assert run(2, main) == [list(map(float, range(64)))] * 2


@both
def test_a_receive_buffer_never_aliases_what_was_sent(run: Run) -> None:
    def main(transport: Transport) -> float:
        out, inn = pair(transport)
        mine, buffer = torch.ones(4), torch.zeros(4)
        work = inn.irecv(buffer)
        out.isend(mine).wait()
        work.wait()
        mine.fill_(7)
        return float(buffer.sum())

    assert run(2, main) == [4.0, 4.0]


@both
def test_strided_tensors_are_refused(run: Run) -> None:
    with pytest.raises(ValueError, match=r"channel .*contiguous"):
        run(2, lambda transport: pair(transport)[0].isend(torch.zeros(3, 2).t()))


def test_threads_name_a_size_that_differs() -> None:
    def main(transport: Transport) -> None:
        out, inn = pair(transport)
        if transport.rank == 0:
            out.isend(torch.zeros(3))
        else:
            inn.irecv(torch.zeros(4, dtype=torch.float64)).wait()

    with pytest.raises(
        RuntimeError,
        match=r"channel F from .*: rank 0 sends 3 x torch.float32.*rank 1 receives 4 x torch.fl",
    ):
        over_threads(2, main)


@pytest.mark.parametrize("length", [5, 3], ids=["buffer longer", "buffer shorter"])
@pytest.mark.slow
def test_gloo_never_fills_a_buffer_of_another_size(length: int) -> None:
    buffer, given_up = torch.full((length,), 9.0), threading.Event()

    def main(transport: Transport) -> None:
        out, inn = pair(transport)
        if transport.rank == 0:
            out.isend(torch.zeros(4))
            given_up.wait(HANG_S)
            return
        try:
            inn.irecv(buffer).wait()
        finally:
            given_up.set()

    with pytest.raises(PeerTimeout, match=rf"receive of {4 * length} bytes on channel F from rank 0 to rank 1, peer 0"):
        over_gloo(2, main, timeout_s=1)
    assert (buffer == 9).all()


@both
@pytest.mark.slow
def test_a_silent_peer_ends_a_wait_after_the_time_limit(run: Run) -> None:
    quiet = threading.Event()

    def main(transport: Transport) -> tuple[float, int | None]:
        _, inn = pair(transport)
        if transport.rank == 0:
            quiet.wait(HANG_S)
            return 0.0, None
        start = time.monotonic()
        with pytest.raises(PeerTimeout, match=r"from rank 0 to rank 1, peer 0.* 1 s") as caught:
            inn.irecv(torch.zeros(1)).wait()
        quiet.set()
        return time.monotonic() - start, caught.value.peer

    waited, peer = run(2, main, timeout_s=1)[1]
    assert 0.9 < waited < 15 and peer == 0


@both
def test_abort_ends_the_waits_of_both_sides(run: Run) -> None:
    """From another thread than the one that waits, in a receive, a send and a sum."""

    def main(transport: Transport) -> list[int | None]:
        me, peer = transport.rank, 1 - transport.rank
        silent = [Edge(a, b, kind) for kind in ("never sent", "never received") for a, b in ((0, 1), (1, 0))]
        transport.open(silent)
        transport.open_group([0, 1], "sum")
        receive = transport.channel(Edge(peer, me, "never sent")).irecv(torch.zeros(1))
        send = transport.channel(Edge(me, peer, "never received")).isend(torch.zeros(2**22))
        if transport.rank == 0:
            timer = threading.Timer(0.2, transport.abort)
            timer.start()
            total = transport.all_reduce(torch.zeros(1), [0, 1], "sum")
            with pytest.raises(PeerLost):
                total.wait()
        peers = []
        for work in (receive, send):
            with pytest.raises(PeerLost) as caught:
                while True:  # a send that was copied returns until the abort has come to its channel
                    work.wait()
            peers.append(caught.value.peer)
        return peers

    start = time.monotonic()
    assert run(2, main) == [[1, 1], [0, 0]]
    assert time.monotonic() - start < 15  # the time limit is 20


def test_gloo_waits_for_its_first_connection_no_longer_than_for_a_message() -> None:
    transport = GlooTransport(0, 2, dist.HashStore(), timeout_s=0.3)
    with pytest.raises(PeerTimeout, match=r"connecting channel F from rank 0 to rank 1, peer 1") as caught:
        transport.open([Edge(0, 1, "F")])
    assert caught.value.peer == 1
    with pytest.raises(PeerTimeout, match=r"connecting group sum of ranks \[0, 1\]"):
        transport.open_group([0, 1], "sum")


@both
def test_sums_over_groups_that_only_their_members_open(run: Run) -> None:
    def main(transport: Transport) -> list[list[float]]:
        rank, totals = transport.rank, []
        for members in ([0, 1], [2, 3], [0, 1, 2, 3], [1, 3]):
            if rank not in members:
                continue
            transport.open_group(members, "g")
            for _ in range(2):
                value = torch.tensor([rank + 0.1, 1.0], dtype=torch.float64)
                transport.all_reduce(value, members, "g").wait()
            transport.all_reduce(torch.zeros(0), members, "g").wait()
            totals.append(value.tolist())
        return totals

    everyone, pairs = [6.4, 4.0], {0: [1.2, 2.0], 2: [5.2, 2.0], 1: [4.2, 2.0]}
    got = run(4, main)
    assert [[round(x, 9) for x in row] for row in got[0]] == [pairs[0], everyone]
    assert [[round(x, 9) for x in row] for row in got[3]] == [pairs[2], everyone, pairs[1]]
    assert got[0][1] == got[1][1] == got[2][1] == got[3][1]  # bitwise


@both
def test_several_sums_may_be_under_way(run: Run) -> None:
    def main(transport: Transport) -> list[float]:
        transport.open_group([0, 1], "g")
        values = [torch.tensor([float(k)]) for k in range(5)]
        works = [transport.all_reduce(value, [0, 1], "g") for value in values]
        for work in reversed(works):
            work.wait()
        return [float(value) for value in values]

    assert run(2, main) == [[0, 2, 4, 6, 8]] * 2


def test_threads_add_in_rank_order() -> None:
    parts = torch.randn(4, 1000, generator=gen(0))

    def main(transport: Transport) -> torch.Tensor:
        time.sleep(0.01 * (3 - transport.rank))  # arrive in the opposite order
        value = parts[transport.rank].clone()
        transport.all_reduce(value, [0, 1, 2, 3], "g").wait()
        return value

    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert all(torch.equal(value, expected) for value in over_threads(4, main))


def test_threads_name_sums_that_differ() -> None:
    def main(transport: Transport) -> None:
        transport.all_reduce(torch.zeros(2 + transport.rank), [0, 1], "g").wait()

    with pytest.raises(RuntimeError, match=r"all-reduce g over ranks \[0, 1\].*\(2,\).*\(3,\)"):
        over_threads(2, main)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16])
def test_the_backend_refuses_what_it_cannot_add(dtype: torch.dtype) -> None:
    def main(transport: Transport) -> None:
        transport.open_group([0, 1], "g")
        transport.all_reduce(torch.zeros(2, dtype=dtype), [0, 1], "g")

    with pytest.raises(ValueError, match=rf"does not add {dtype}"):
        over_gloo(2, main)


def test_threads_name_channel_lists_that_differ() -> None:
    """The k-th list of each rank is compared with the k-th of the others."""
    hub = ThreadHub(2, 1.0)
    for _ in range(2):
        hub.transport(0).open([Edge(0, 1, "F"), Edge(1, 0, "B")])
    with pytest.raises(ValueError, match=r"rank 1 opens channel B from rank 1 to rank 0 where.*channel F from"):
        hub.transport(1).open([Edge(1, 0, "B"), Edge(0, 1, "F")])
    with pytest.raises(ValueError, match="rank 1 opens 1 channels, another rank 2"):
        hub.transport(1).open([Edge(0, 1, "F")])


@pytest.mark.slow
def test_many_starts_and_ends() -> None:
    """All channels of a ring in both directions, opened in one order, used once and closed, again and again."""
    edges = [Edge(a, b, "x") for a in range(3) for b in range(3) if a != b]

    def main(transport: Transport) -> float:
        transport.open(edges)
        buffers = torch.zeros(3)
        works = [transport.channel(e).irecv(buffers[e.src : e.src + 1]) for e in edges if e.dst == transport.rank]
        works += [transport.channel(e).isend(torch.ones(1)) for e in edges if e.src == transport.rank]
        for work in works:
            work.wait()
        return float(buffers.sum())

    for _ in range(20):
        assert over_gloo(3, main) == [2.0, 2.0, 2.0]


def _wait_for_the_other(transport: Transport, pipe: Any) -> None:
    out, inn = pair(transport)
    buffer = torch.zeros(1)
    receive = inn.irecv(buffer)
    out.isend(torch.ones(1)).wait()
    receive.wait()
    pipe.send("met")
    try:
        inn.irecv(buffer).wait()
    except (PeerLost, PeerTimeout) as error:
        pipe.send((type(error).__name__, error.peer, str(error)))


@pytest.mark.process
@pytest.mark.parametrize(("signum", "kind"), [(signal.SIGKILL, "PeerLost"), (signal.SIGSTOP, "PeerTimeout")])
@pytest.mark.slow
def test_a_peer_that_died_or_froze_is_named(signum: int, kind: str) -> None:
    with processes(2, _wait_for_the_other, timeout_s=20.0 if kind == "PeerLost" else 3.0) as started:
        (victim, _), (_, pipe) = started
        for _, each in started:
            assert each.poll(HANG_S) and each.recv() == "met"
        os.kill(victim.pid, signum)
        start = time.monotonic()
        assert pipe.poll(HANG_S)
        assert time.monotonic() - start < 15
        name, peer, message = pipe.recv()
        assert (name, peer) == (kind, 0) and "channel F from rank 0 to rank 1" in message


@pytest.mark.gpu
def test_nccl_carries_messages_and_sums() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL does not let ranks share one")
    from engine.transport.nccl import NcclTransport

    store = dist.HashStore()

    def main(rank: int, results: list[Any]) -> None:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        transport = NcclTransport(rank, 2, store, 30.0, device)
        out, inn = pair(transport)
        transport.open_group([0, 1], "g")
        buffer = torch.zeros(5, dtype=torch.bool, device=device)
        receive = inn.irecv(buffer)
        out.isend(torch.ones(5, dtype=torch.bool, device=device)).wait()
        receive.wait()
        total = torch.full((3,), rank + 1.0, device=device)
        transport.all_reduce(total, [0, 1], "g").wait()
        results[rank] = (buffer.tolist(), total.tolist())
        transport.close()

    results: list[Any] = [None, None]
    threads = [threading.Thread(target=main, args=(rank, results)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert results == [([True] * 5, [3.0] * 3)] * 2
