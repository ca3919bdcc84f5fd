"""Workers as processes and as threads: every way a run can end, and that nothing is left behind."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launched
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launched import job_of

from engine.job import Job
from engine.launch import supervise
from engine.launch.failure_report import OUT_OF_MEMORY, FailureReport, Outcome
from engine.launch.launch import in_processes, in_threads
from engine.launch.supervise import warm_up
from engine.telemetry.records import Record
from engine.transport import Edge

LIMIT_S = 15.0  # the promise: within this time everything is gone


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """The fork server lives as long as this process: start it before a test looks for children left behind."""
    warm_up()


@pytest.fixture
def records() -> list[Record]:
    return []


def run(entry: Callable[..., None], records: list[Record], **how: Any) -> Outcome:
    start = time.monotonic()
    outcome = in_processes(job_of(**how), records.append, entry)
    assert time.monotonic() - start < LIMIT_S
    return outcome


def kinds(records: list[Record], kind: str) -> list[int]:
    return sorted(record.meta["rank"] for record in records if record.kind == kind)


@pytest.mark.process
def test_completes_and_hands_on_every_record(records: list[Record]) -> None:
    assert run(launched.good, records) == Outcome("completed")
    assert kinds(records, "ready") == kinds(records, "done") == [0, 1, 2]
    lines = {r.meta["rank"]: r.meta["message"] for r in records if r.kind == "log"}
    assert lines == {rank: f"hello from {rank}" for rank in range(3)}


@pytest.mark.process
def test_every_worker_is_a_process_of_its_own_group(records: list[Record]) -> None:
    run(launched.good, records)
    pids = {r.meta["pid"] for r in records if r.kind == "ready"}
    assert len(pids) == 3 and os.getpid() not in pids


@pytest.mark.process
@pytest.mark.slow
def test_ends_fifty_times(records: list[Record]) -> None:
    for _ in range(50):
        records.clear()
        assert run(launched.good, records, ranks=2).status == "completed"
        assert kinds(records, "done") == [0, 1]


@pytest.mark.process
def test_own_error_outweighs_what_others_saw_of_it(records: list[Record]) -> None:
    outcome = run(launched.raises, records)
    assert outcome.status == "failed" and outcome.exit_code == 1
    expected = "rank 1 (stage 1, micro-batch 2, in 1B2) failed: ArithmeticError: the loss is not finite"
    assert outcome.error == expected
    assert outcome.traceback is not None and "launched.py" in outcome.traceback


@pytest.mark.process
@pytest.mark.slow
def test_killed_worker_is_named_with_its_last_action(records: list[Record]) -> None:
    outcome = run(launched.killed, records)
    assert outcome.error == f"rank 1 (stage 1, micro-batch 3, in 1F3) was killed by SIGKILL ({OUT_OF_MEMORY})"
    assert outcome.exit_code == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (launched.interrupted, "rank 0 was killed by SIGINT"),
        (launched.keyboard, "rank 0 failed: KeyboardInterrupt: (no message)"),
        (launched.leaves, "rank 0 failed: SystemExit: 0"),
        (launched.silent, "rank 1 ended with exit status 0 before the run was over"),
    ],
)
@pytest.mark.slow(keep=3)
def test_a_worker_that_leaves_early_is_a_failure(entry: Callable[..., None], said: str, records: list[Record]) -> None:
    outcome = run(entry, records)
    assert (outcome.status, outcome.error) == ("failed", said)


def test_a_worker_that_cannot_be_started_says_what_it_needs(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """A context in a process that has no file left to open."""

        RawArray = staticmethod(lambda code, values: values)

        @staticmethod
        def Pipe(duplex: bool) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(supervise, "context", Full)
    monkeypatch.setattr(supervise, "warm_up", lambda: None)
    with pytest.raises(OSError, match=r"rank 0 of 3 could not be started: .*Too many open files.*ulimit -n"):
        run(launched.good, records)


@pytest.mark.process
@pytest.mark.slow
def test_frozen_rank_is_named(records: list[Record]) -> None:
    outcome = run(launched.frozen, records)
    assert outcome.error is not None and outcome.error.startswith("rank 2 went silent")


@pytest.mark.process
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_to_the_parent_ends_workers_and_their_children(signum: int, code: int) -> None:
    children: list[int] = []

    def on_record(record: Record) -> None:
        children.append(record.meta["threads"])
        if len(children) == 2:
            os.kill(os.getpid(), signum)

    outcome = in_processes(job_of(2), on_record, launched.with_children)
    assert (outcome.status, outcome.exit_code) == ("interrupted", code)
    _gone(children)


def _gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker's child outlived it"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.process
def test_error_of_the_listener_ends_the_workers() -> None:
    def on_record(record: Record) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        in_processes(job_of(2), on_record, launched.with_children)


@pytest.mark.process
def test_threads_per_worker_reach_the_worker(records: list[Record]) -> None:
    run(launched.good, records, ranks=2, threads_per_worker=3)
    assert {r.meta["threads"] for r in records if r.kind == "ready"} == {3}


@pytest.mark.process
def test_a_pinned_worker_keeps_to_its_share(records: list[Record]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    run(launched.kept, records, ranks=3, threads_per_worker=1, pin_workers="always")
    told = {r.meta["rank"]: r.meta["message"] for r in records if r.kind == "log" and r.meta["logger"] == "user"}
    assert told == {rank: f"cores {[allowed[rank % len(allowed)]]}" for rank in range(3)}
    assert sorted(os.sched_getaffinity(0)) == allowed  # of the parent


COOLING = """
import os
from multiprocessing import forkserver
from engine.launch.supervise import cool_down, warm_up
cool_down()  # nothing to end
warm_up()
cool_down()
print(os.waitstatus_to_exitcode(os.waitpid(forkserver._forkserver._forkserver_pid, 0)[1]))
"""


def test_the_fork_server_can_be_ended_in_the_middle_of_its_imports() -> None:
    done = subprocess.run([sys.executable, "-c", COOLING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("-9\n", "")


# ---- threads -----------------------------------------------------------------------------------------------------


def waits_in_vain(job: Job, rank: int, hub: Any, post: Callable[[bytes], None]) -> None:
    """Every rank waits for a message from rank 1, which raises instead."""
    edges = [Edge(1, other, "F") for other in range(job.world) if other != 1]
    transport = hub.transport(rank)
    transport.open(edges)
    if rank == 1:
        raise ArithmeticError("the loss is not finite")
    transport.channel(Edge(1, rank, "F")).irecv(torch.empty(1)).wait()


def interrupts(job: Job, rank: int, hub: Any, post: Callable[[bytes], None]) -> None:
    """A signal arrives while every rank is busy."""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    while not hub.aborted:
        time.sleep(0.01)


@pytest.fixture
def same_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.usefixtures("same_threads")
def test_threads_complete_and_log_by_rank(records: list[Record], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert in_threads(job_of(), records.append, launched.good) == Outcome("completed")
    lines = {r.meta["rank"]: r.meta["message"] for r in records if r.kind == "log"}
    assert lines == {rank: f"hello from {rank}" for rank in range(3)}


@pytest.mark.usefixtures("same_threads")
def test_threads_fail_with_the_first_true_error(records: list[Record]) -> None:
    outcome = in_threads(job_of(), records.append, waits_in_vain)
    assert (outcome.status, outcome.error) == ("failed", "rank 1 failed: ArithmeticError: the loss is not finite")
    assert kinds(records, "error") == [0, 1, 2]


@pytest.mark.usefixtures("same_threads")
def test_threads_are_interrupted(records: list[Record]) -> None:
    outcome = in_threads(job_of(2), records.append, interrupts)
    assert (outcome.status, outcome.exit_code) == ("interrupted", 143)


@pytest.mark.usefixtures("same_threads")
def test_threads_leave_the_number_of_threads_as_it_was(records: list[Record]) -> None:
    before = torch.get_num_threads()
    in_threads(job_of(2, threads_per_worker=before + 1), records.append, launched.good)
    assert {r.meta["threads"] for r in records if r.kind == "ready"} == {before + 1}
    assert torch.get_num_threads() == before


# ---- which error ---------------------------------------------------------------------------------------------------


def error(rank: int, time_ns: int, own: bool = True, peer: int | None = None) -> dict[str, Any]:
    place = {"stage": None, "microbatch": None, "action": None}
    what = {"type": "ValueError", "message": f"error of {rank}", "traceback": f"traceback of {rank}"}
    return {"rank": rank, "own": own, "peer": peer, "time_ns": time_ns} | place | what


@given(st.permutations(range(4)), st.permutations([True, True, False, False]))
def test_the_earliest_own_error_wins_in_any_order_of_arrival(order: list[int], own: list[bool]) -> None:
    failures = FailureReport(4, 4)
    for rank in order:
        failures.add_error(error(rank, 100 - rank, own[rank]))
    first = max(rank for rank in range(4) if own[rank])
    assert failures.message() == f"rank {first} failed: ValueError: error of {first}"
    assert failures.traceback == f"traceback of {first}"


@given(st.lists(st.integers(-(10**15), 10**15), min_size=3, max_size=3), st.permutations(range(4)))
def test_errors_on_hosts_with_other_clocks_are_compared_on_one(ahead: list[int], order: list[int]) -> None:
    """Rank 2 fails first, whatever the clocks of ranks 1 to 3 say: each is so far ahead of rank 0's."""
    clocks = [0, *ahead]
    for own in (True, False):
        failures = FailureReport(4, 4)
        for rank in range(1, 4):
            failures.add_clock({"rank": rank, "leader": rank, "offset_ns": -clocks[rank]})
        for rank in order:
            failures.add_error(error(rank, 10**16 + clocks[rank] + abs(rank - 2), own, peer=None if own else 2))
        assert failures.message() == ("rank 2 failed: ValueError: error of 2" if own else "rank 2 saw: error of 2")


def test_a_death_outweighs_what_others_saw() -> None:
    failures = FailureReport(2, 4)
    failures.add_error(error(0, 1, own=False, peer=3))
    failures.add_death(3, -signal.SIGKILL)
    assert failures.message() == f"rank 3 (replica 1, pipeline rank 1) was killed by SIGKILL ({OUT_OF_MEMORY})"


def test_silence_names_the_end_of_the_chain_of_waits() -> None:
    failures = FailureReport(4, 4)
    for rank in (0, 1, 2):
        failures.add_error(error(rank, rank, own=False, peer=rank + 1))
    assert failures.message() == "rank 3 went silent; rank 0 saw: error of 0"
    failures = FailureReport(3, 3)
    failures.add_error(error(0, 0, own=False))
    assert failures.message().startswith("rank 1, rank 2 went silent")


def test_failure_outweighs_a_signal() -> None:
    failures = FailureReport(2, 2)
    assert failures.outcome(None) == Outcome("completed")
    assert failures.outcome(signal.SIGINT) == Outcome("interrupted", "interrupted by SIGINT", 130)
    failures.add_death(0, -signal.SIGSEGV)
    assert failures.outcome(signal.SIGTERM).error == "rank 0 was killed by SIGSEGV"
