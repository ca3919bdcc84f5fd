"""Which cores a worker computes on, and which it waits on."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from hypothesis import given
from hypothesis import strategies as st
from launched import job_of

from engine.environment import cores
from engine.training import cores as module
from engine.training.cores import (
    FIRST_REVIEW_S,
    IDLE,
    REVIEW_S,
    WaitingCores,
    idle_seconds,
    share_of,
    share_of_cores,
    threads_per_worker,
    waits_of,
)
from engine.transport import Edge, Transport
from engine.transport.gloo import GlooTransport
from engine.transport.shared import SharedMemoryTransport
from engine.transport.waits import ANYWHERE, T, Waits

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
MINE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


@given(st.integers(1, 9), st.integers(1, 4), st.sets(st.integers(0, 99), min_size=1, max_size=12).map(sorted))
def test_shares_of_cores(workers: int, threads: int, allowed: list[int]) -> None:
    shares = [share_of_cores(place, workers, threads, allowed) for place in range(workers)]
    assert all(len(share) == min(threads, len(allowed)) and share <= set(allowed) for share in shares)
    if workers * threads <= len(allowed):
        assert sum(map(len, shares)) == len(set().union(*shares))
    elif 2 * threads <= len(allowed):
        assert all(not one & other for one, other in itertools.pairwise(shares))


def test_threads_share_out_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for ranks, replicas in ((1, 1), (2, 1), (2, 2), (64, 4)):
        each = threads_per_worker(job_of(ranks, replicas))
        assert each >= 1 and (each == 1 or each * ranks * replicas <= cores())
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads_per_worker(job_of(4)) == 7
    assert threads_per_worker(job_of(4, threads_per_worker=2)) == 2


class Host:
    """Cores that are idle as told, and a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 100.0
        self.idle: dict[int, float] = {}
        self.looks = 0

    def pass_by(self, seconds: float, idle: dict[int, float]) -> None:
        """`idle`: of these cores, which part of the time."""
        self.time += seconds
        for core, part in idle.items():
            self.idle[core] = self.idle.get(core, 50.0) + part * seconds

    def read(self) -> dict[int, float]:
        self.looks += 1
        return dict(self.idle)

    def waiting(self, share: set[int]) -> WaitingCores:
        return WaitingCores(share, self.read, lambda: self.time)


class Asked:
    """A wait: notes the cores that the thread may use meanwhile."""

    def __init__(self, raises: type[BaseException] | None = None) -> None:
        self.raises = raises
        self.seen: list[list[int]] = []

    def __call__(self) -> str:
        self.seen.append(sorted(os.sched_getaffinity(0)))
        if self.raises is not None:
            raise self.raises
        return "a message"


@given(
    st.dictionaries(st.integers(0, 9), st.floats(0, 1), min_size=2),
    st.integers(1, 5),
    st.floats(FIRST_REVIEW_S, 100),
)
def test_a_share_is_quiet_while_it_is_idle_most_of_the_time(idle: dict[int, float], size: int, pause: float) -> None:
    host, share = Host(), set(sorted(idle)[:size])
    waiting = host.waiting(share)
    host.pass_by(0.0, idle)
    waiting.review()
    assert not waiting.quiet  # one look says nothing
    host.pass_by(pause, idle)
    waiting.review()
    part = sum(idle[core] for core in share) / len(share)
    if abs(part - IDLE) > 1e-6:
        assert waiting.quiet == (part > IDLE)
    host.pass_by(pause, dict.fromkeys(idle, 0.0))
    waiting.review()
    assert not waiting.quiet


def test_cores_that_the_system_says_nothing_of_are_busy() -> None:
    host = Host()
    waiting = host.waiting({0})
    for _ in range(3):
        host.pass_by(1.0, {5: 1.0})
        waiting.review()
        assert not waiting.quiet


@given(st.lists(st.floats(0, 3), max_size=40))
def test_looks_are_rare(pauses: list[float]) -> None:
    host = Host()
    waiting = host.waiting({0})
    for pause in pauses:
        host.pass_by(pause, {0: 1.0})
        waiting.keep(Asked())
    begun = 1 if pauses else 0
    assert host.looks <= begun + sum(pauses) / FIRST_REVIEW_S
    assert host.looks <= 2 * begun + sum(pauses) / REVIEW_S


def test_a_slow_look_is_a_rare_one() -> None:
    host = Host()

    def slow() -> dict[int, float]:
        host.time += 0.5
        return host.read()

    waiting = WaitingCores({0}, slow, lambda: host.time)
    for _ in range(1000):
        host.time += 0.1
        waiting.keep(Asked())
    assert host.looks == 1


def quiet(share: set[int]) -> WaitingCores:
    host = Host()
    waiting = host.waiting(share)
    for _ in range(2):
        host.pass_by(1.0, dict.fromkeys(share, 1.0))
        waiting.review()
    assert waiting.quiet
    return waiting


@pytest.mark.parametrize("raises", [None, KeyboardInterrupt, OSError])
def test_a_thread_keeps_to_a_quiet_share_only_while_it_waits(raises: type[BaseException] | None) -> None:
    waiting, asked = quiet({MINE[-1]}), Asked(raises)
    if raises is None:
        assert waiting.keep(asked) == "a message"
    else:
        with pytest.raises(raises):
            waiting.keep(asked)
    assert asked.seen == [[MINE[-1]]]
    assert sorted(os.sched_getaffinity(0)) == MINE


def test_only_the_waiting_thread_is_kept() -> None:
    waiting, entered, leave = quiet({MINE[0]}), threading.Event(), threading.Event()
    kept: list[list[int]] = []

    class Long(Asked):
        def __call__(self) -> str:
            found = super().__call__()
            entered.set()
            leave.wait(20)
            return found

    asked = Long()
    thread = threading.Thread(target=lambda: waiting.keep(asked))
    thread.start()
    assert entered.wait(20)
    other = threading.Thread(target=lambda: kept.append(sorted(os.sched_getaffinity(0))))
    other.start()
    other.join(20)
    leave.set()
    thread.join(20)
    assert asked.seen == [[MINE[0]]]
    assert kept == [MINE]


def test_a_share_that_is_taken_away_is_not_waited_on() -> None:
    waiting, asked = quiet({MINE[-1]}), Asked()
    waiting.share = {10**4}
    for _ in range(3):
        assert waiting.keep(asked) == "a message"
    assert asked.seen == [MINE] * 3
    assert sorted(os.sched_getaffinity(0)) == MINE


@pytest.mark.skipif(len(MINE) < 2, reason="needs two cores")
@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("chosen", [{MINE[0]}, {MINE[-1]}], ids=["the share", "others"])
def test_cores_that_are_chosen_from_outside_are_kept(chosen: set[int], during: bool) -> None:
    """Before a wait, or in the middle of one. What is chosen then and is the very share cannot be told from ours."""

    class Chosen(Asked):
        def __call__(self) -> str:
            found = super().__call__()
            if during:
                os.sched_setaffinity(0, chosen)
            return found

    waiting, asked = quiet({MINE[0]}), Chosen()
    try:
        if not during:
            os.sched_setaffinity(0, chosen)
        for _ in range(3):
            waiting.keep(asked)
        if during and chosen == waiting.share:
            assert sorted(os.sched_getaffinity(0)) == MINE
        else:
            assert os.sched_getaffinity(0) == chosen
            assert asked.seen[-1] == sorted(chosen)
    finally:
        os.sched_setaffinity(0, set(MINE))


def test_a_busy_share_is_not_waited_for() -> None:
    host, asked = Host(), Asked()
    waiting = host.waiting({MINE[0]})
    for _ in range(5):
        host.pass_by(2.0, {MINE[0]: IDLE / 2})
        waiting.keep(asked)
    assert asked.seen == [MINE] * 5


@pytest.mark.skipif(len(MINE) < 2, reason="needs two cores")
def test_threads_that_bring_what_is_waited_for_are_kept_while_the_share_is_quiet() -> None:
    host, leave = Host(), threading.Event()
    bringing, other = (threading.Thread(target=leave.wait, args=(20,)) for _ in range(2))
    for thread in (bringing, other):
        thread.start()
    assert bringing.native_id and other.native_id
    waiting = host.waiting({MINE[0]})
    waiting.also([bringing.native_id])

    def look(idle: float) -> list[int]:
        host.pass_by(REVIEW_S, {MINE[0]: idle})
        waiting.review()
        assert sorted(os.sched_getaffinity(0)) == sorted(os.sched_getaffinity(other.native_id or 0)) == MINE
        return sorted(os.sched_getaffinity(bringing.native_id or 0))

    try:
        assert [look(1.0), look(1.0), look(1.0)] == [MINE, [MINE[0]], [MINE[0]]]
        assert [look(0.0), look(1.0)] == [MINE, [MINE[0]]]
        os.sched_setaffinity(bringing.native_id, {MINE[-1]})  # somebody else's choice
        assert [look(0.0), look(1.0)] == [[MINE[-1]]] * 2
    finally:
        leave.set()
        for thread in (bringing, other):
            thread.join(20)
    for idle in (1.0, 0.0, 1.0):  # a thread that has gone
        host.pass_by(REVIEW_S, {MINE[0]: idle})
        waiting.review()
        assert waiting.quiet == bool(idle)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc/stat")
def test_idle_seconds_of_this_host_grow_no_faster_than_time() -> None:
    first, begun = idle_seconds(), module.time.monotonic()
    threading.Event().wait(0.05)
    second, lasted = idle_seconds(), module.time.monotonic() - begun
    assert set(MINE) <= set(first)
    for core, before in first.items():
        assert 0 <= second[core] - before <= lasted + 0.05  # ticks


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            "cpu  9 9 9 9 9 9\ncpu0 1 2 3 400 50 6 7\ncpu12 1 2 3 0 100 6\nintr 5 6\ncpu3 1 1 1 1 1 1\n",
            {0: 450, 12: 100},
        ),
        ("cpu0 1 2 3 400\n", {}),
        ("", {}),
        ("intr 1 2 3\n", {}),
    ],
)
def test_idle_ticks_are_read(lines: str, found: dict[int, int]) -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert module._read_idle(lines.splitlines()) == pytest.approx({core: n * tick for core, n in found.items()})


def test_an_unreadable_file_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(module.Path, "open", missing)
    assert idle_seconds() == {}


@pytest.mark.parametrize("when", ["never", "waiting", "always"])
def test_who_waits_where(when: str) -> None:
    job = job_of(4, pin_workers=when, threads_per_worker=1)
    if when == "waiting" and len(MINE) > 1:
        for rank in range(4):
            waiting = waits_of(job, rank)
            assert isinstance(waiting, WaitingCores)
            assert waiting.share == share_of(job, rank) == {MINE[rank % len(MINE)]}
    else:
        assert waits_of(job, 0) is ANYWHERE


def test_a_share_of_all_cores_is_no_share() -> None:
    assert waits_of(job_of(2, threads_per_worker=len(MINE)), 0) is ANYWHERE


@pytest.mark.skipif(len(MINE) < 2, reason="needs two cores")
def test_the_share_is_of_the_cores_that_the_thread_may_use() -> None:
    os.sched_setaffinity(0, {MINE[1]})
    try:
        assert share_of(job_of(2, threads_per_worker=1), 0) == {MINE[1]}
        assert waits_of(job_of(2, threads_per_worker=1), 0) is ANYWHERE
    finally:
        os.sched_setaffinity(0, set(MINE))


class Noted(Waits):
    """Notes who waits through it, and for what threads."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.waited = 0

    def also(self, threads: Sequence[int]) -> None:
        self.threads += threads

    def keep(self, wait: Callable[[], T]) -> T:
        self.waited += 1
        return wait()


@pytest.mark.parametrize("kind", [GlooTransport, SharedMemoryTransport])
def test_receives_wait_where_the_rank_waits_and_sends_do_not(kind: Any) -> None:
    edge, store, noted = Edge(0, 1, "F"), dist.HashStore(), [Noted(), Noted()]

    def main(transport: Transport) -> list[float]:
        transport.open([edge])
        channel, data = transport.channel(edge), torch.full((3,), float(transport.rank))
        if transport.rank == 0:
            time.sleep(0.05)  # the other side waits already
            channel.isend(data + 7).wait()
        else:
            channel.irecv(data).wait()
        return data.tolist()

    made = workers.over(2, main, lambda rank: kind(rank, 2, store, 20.0, waits=noted[rank]))
    assert made[1] == [7.0] * 3
    assert [each.waited for each in noted] == [0, 1]
    for each in noted:
        assert bool(each.threads) == (kind is GlooTransport)  # gloo's own, which brings the bytes
