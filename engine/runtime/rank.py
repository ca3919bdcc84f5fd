"""What surrounds a worker, however it was launched: its threads, its log lines, its last words.

`guarded` runs the worker and turns whatever it raises, KeyboardInterrupt and SystemExit included, into one `error`
record, which says whether the error is the rank's own or only what it saw of another rank's end. A worker that
succeeds posts `done` itself, as its last record.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable

import torch

from engine.job import Job
from engine.records import encode
from engine.runtime.transport import PeerError

Post = Callable[[bytes], None]


def guarded(rank: int, post: Post, work: Callable[[], None]) -> bool:
    """Run `work` as world rank `rank`; post what it raises. Returns whether it succeeded; raises nothing."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001  # an interrupted worker must not look like one that succeeded
        post(error_record(rank, error))
        return False
    return True


def error_record(rank: int, error: BaseException) -> bytes:
    peer = isinstance(error, PeerError)
    meta = {
        "rank": rank,
        "stage": getattr(error, "stage", None),
        "microbatch": getattr(error, "microbatch", None),
        "action": getattr(error, "action", None),
        "own": not peer,
        "peer": error.peer if isinstance(error, PeerError) else None,
        "type": type(error).__name__,
        "message": str(error) or "(no message)",
        "traceback": "".join(traceback.format_exception(error)),
        "time_ns": time.monotonic_ns(),
    }
    return encode("error", meta)


def threads_per_worker(job: Job) -> int:
    """Threads that torch may use in each worker: as configured, else OMP_NUM_THREADS, else the cores shared out."""
    configured = job.settings.threads_per_worker
    if configured is not None:
        return configured
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    return max(1, cores() // job.world)


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(job: Job) -> None:
    """Set the calling thread's number of torch threads."""
    torch.set_num_threads(threads_per_worker(job))


class PostLog(logging.Handler):
    """Sends log lines to the parent as `log` records."""

    def __init__(self, rank: int, post: Post) -> None:
        super().__init__()
        self._rank, self._post = rank, post

    def emit(self, record: logging.LogRecord) -> None:
        meta = {"rank": self._rank, "level": record.levelno, "logger": record.name, "message": self.format(record)}
        with contextlib.suppress(OSError):  # the parent is gone, and soon this process
            self._post(encode("log", meta))


def forward_logging(rank: int, post: Post) -> None:
    """In a process of its own: every log line from INFO up, and every warning, goes to the parent."""
    root = logging.getLogger()
    root.handlers[:] = [PostLog(rank, post)]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
