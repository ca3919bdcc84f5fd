"""The first function of a worker process: own process group, no outliving the parent, then the rank's work."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.job import Job
from engine.launch import handover
from engine.launch import rank as surroundings
from engine.telemetry import position
from engine.training import cores
from engine.training.connect import connect, store_in


def main(entry: Any, given: bytes, rank: int, meeting: Any, pipe: Connection, positions: Any) -> None:
    """Run one rank of the job in `given`; the exit status is 0 where it succeeded. Called in a fresh process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server has it blocked
    _own_group()  # first: the watch kills the group it is in
    _leave_with_parent()
    position.use(memoryview(positions).cast("B").cast("q")[rank : rank + 1])
    lock = threading.Lock()

    def post(record: bytes) -> None:
        with lock:  # a logging thread may post beside the worker
            pipe.send_bytes(record)

    job = handover.read(given)
    surroundings.forward_logging(rank, post)
    cores.limit_threads(job)
    cores.keep_to_cores(job, rank)
    succeeded = surroundings.guarded(rank, post, lambda: entry(job, rank, meeting, post))
    pipe.close()
    if not succeeded:
        sys.exit(1)


def _own_group() -> None:
    """Ctrl-C in the terminal is for the parent; a signal meant for this worker alone ends it, and the parent says so.

    Without Python's handlers a signal also ends a wait inside the backend, which never returns to the interpreter.
    """
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    faulthandler.enable()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def join_and_work(job: Job, rank: int, folder: str, post: surroundings.Post) -> None:
    """Meet the other ranks at the store in the parent's folder, then do this rank's work."""
    transport = connect(job, rank, store_in(folder, job.settings.timeout_s))
    surroundings.work(job, rank, transport, post)
