"""Runs a job's workers and says how it ended: completed, failed (with the first true error) or interrupted.

processes   one process per rank, started and supervised here
threads     one thread per rank of this process
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine import environment
from engine.job import Job
from engine.launch import interrupt, joined
from engine.launch.ending import Ending
from engine.launch.failure_report import FailureReport, Outcome
from engine.launch.rank import guarded, thread_logging, work
from engine.launch.supervise import Entry, OnRecord, Supervisor
from engine.telemetry.records import decode
from engine.training.connect import connect
from engine.training.cores import limit_threads

if TYPE_CHECKING:
    from engine.transport.threads import ThreadHub

Events = queue.SimpleQueue[bytes | int | None]  # a record; the number of a signal; None: a thread has ended
LEAVE_GRACE_S = 10.0  # for the other threads, after the first that failed: a thread cannot be killed


def launch(job: Job, on_record: OnRecord) -> Outcome:
    """Run every rank of `job`; `on_record` gets each record in this thread. No worker outlives the call."""
    if environment.joined():
        return joined.meeting().lead(job, on_record)
    return in_threads(job, on_record) if job.settings.launch == "threads" else in_processes(job, on_record)


def in_processes(job: Job, on_record: OnRecord, entry: Entry | None = None) -> Outcome:
    """Run a job with one process per rank.

    `entry(job, rank, folder, post)` is what each worker runs; they meet at a store in a folder of their user's.
    """
    from engine.launch.process import join_and_work

    with environment.private_folder() as folder:
        supervisor = Supervisor(job, on_record, entry or join_and_work, folder)
        signum = supervisor.run()
    return supervisor.failures.outcome(signum)


def in_threads(job: Job, on_record: OnRecord, entry: Entry | None = None) -> Outcome:
    """Run a job with one thread per rank of this process.

    `entry(job, rank, hub, post)` is what each thread runs.
    """
    from engine.transport.threads import ThreadHub

    hub = ThreadHub(job.world, job.settings.timeout_s)
    events: Events = queue.SimpleQueue()
    threads = [_thread(job, rank, hub, events, entry or _work) for rank in range(job.world)]
    before = torch.get_num_threads()
    failures = FailureReport(job.ranks, job.world)
    signum = None
    try:
        with interrupt.waking(events.put):
            for thread in threads:
                thread.start()
            signum = _collect(job, events, on_record, failures, hub)
    finally:
        hub.abort()
        for thread in threads:
            thread.join(LEAVE_GRACE_S)
        torch.set_num_threads(before)
    return failures.outcome(signum)


def _work(job: Job, rank: int, hub: ThreadHub, post: Callable[[bytes], None]) -> None:
    work(job, rank, connect(job, rank, hub), post)


def _thread(job: Job, rank: int, hub: ThreadHub, events: Events, entry: Entry) -> threading.Thread:
    def main() -> None:
        limit_threads(job)
        with thread_logging(rank, events.put):
            if not guarded(rank, events.put, lambda: entry(job, rank, hub, events.put)):
                hub.abort()
        events.put(None)

    return threading.Thread(target=main, name=f"rank {rank}", daemon=True)


def _collect(job: Job, events: Events, on_record: OnRecord, failures: FailureReport, hub: ThreadHub) -> int | None:
    """Hand on records until every thread has ended, or one could not be brought to; the signal, if one came."""
    left, signum, ending = failures.world, None, Ending(job, on_record)
    while left:
        try:
            event = events.get(timeout=LEAVE_GRACE_S if failures.failed or signum else None)
        except queue.Empty:
            break
        if event is None:
            left -= 1
        elif isinstance(event, int):
            if not ending.ask(event):
                signum = event
                hub.abort()
        elif signum is None:  # what ranks say after they were told to stop is no news
            record = decode(event)
            if record.kind == "error":
                failures.add_error(record.meta)
            elif record.kind == "done":
                failures.stopped = record.meta.get("stopped")
            on_record(record)
    return signum
