"""What surrounds a worker, however it was launched: its log lines, its last words.

`guarded` runs the worker and turns whatever it raises, KeyboardInterrupt and SystemExit included, into one `error`
record, which says whether the error is the rank's own or only what it saw of another rank's end. A worker that
succeeds posts `done` itself, as its last record.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from engine.errors import ExhaustedError, message_of, printable
from engine.job import Job
from engine.telemetry.clock import Clocks
from engine.telemetry.position import place_of
from engine.telemetry.records import encode
from engine.transport import PeerError, Transport

Post = Callable[[bytes], None]


def guarded(rank: int, post: Post, work: Callable[[], None]) -> bool:
    """Run `work` as world rank `rank`; post what it raises. Returns whether it succeeded; raises nothing."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001  # an interrupted worker must not look like one that succeeded
        post(error_record(rank, error))
        return False
    return True


def work(job: Job, rank: int, transport: Transport, post: Post, clocks: Clocks | None = None) -> None:
    """Do the rank's whole work and end its transport: in order, or at once where the work failed.

    `clocks`: given where ranks may not all have one clock.
    """
    from engine.targets import prepare_import_path
    from engine.training import worker
    from engine.training.delay import slowed

    prepare_import_path(job.start_dir)
    transport = slowed(transport, job.settings.delay)
    try:
        worker.run(job, rank, transport, post, clocks)
    except BaseException:
        transport.abort()
        raise
    with contextlib.suppress(PeerError):  # all is done here; a peer that failed reports that itself
        transport.close()


def error_record(rank: int, error: BaseException) -> bytes:
    """Encode an exception of a rank as an `error` record, with where it happened and what to do about it."""
    peer = isinstance(error, PeerError)
    meta = {
        "rank": rank,
        **place_of(error)._asdict(),
        "own": not peer,
        "peer": error.peer if isinstance(error, PeerError) else None,
        "type": type(error).__name__,
        "message": message_of(error) + _remedy(error),
        "traceback": "" if isinstance(error, ExhaustedError) else printable("".join(traceback.format_exception(error))),
        "time_ns": time.monotonic_ns(),
    }
    return encode("error", meta)


def _remedy(error: BaseException) -> str:
    """What to do where a limit of the system was met; how many files a rank needs depends on how many it meets."""
    if type(error) not in (OSError, ExhaustedError):
        return ""
    assert isinstance(error, OSError)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f": a process may open {files} files here: raise the limit (ulimit -n {max(1024, 4 * files)}), or lower "
            "pipeline.ranks or data_parallel.replicas"
        )
    if error.errno == errno.ENOMEM:
        return (
            ": raise the memory limit (ulimit -v, or the container's), use transport=gloo, or lower "
            "train.global_batch_size or raise pipeline.microbatches"
        )
    return ""


class PostLog(logging.Handler):
    """Log handler that sends a rank's lines to the parent as `log` records.

    Where ranks are threads of one process, only lines of the thread that made the handler are this rank's.
    """

    def __init__(self, rank: int, post: Post, thread: int | None = None) -> None:
        super().__init__(logging.INFO)
        self._rank, self._post, self._thread = rank, post, thread

    def emit(self, record: logging.LogRecord) -> None:
        """Post a log line, unless it is another thread's or the parent is gone."""
        if self._thread not in (None, record.thread):
            return
        meta = {
            "rank": self._rank,
            "level": record.levelno,
            "logger": record.name,
            "message": printable(self.format(record)),
        }
        with contextlib.suppress(OSError):  # the parent is gone, and soon this process
            self._post(encode("log", meta))


def forward_logging(rank: int, post: Post) -> None:
    """Send every log line from INFO up, and every warning, to the parent; in a process of the rank's own."""
    root = logging.getLogger()
    root.handlers[:] = [PostLog(rank, post)]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


@contextlib.contextmanager
def thread_logging(rank: int, post: Post) -> Iterator[None]:
    """Context in which the log lines of this thread go to the parent's recorder too."""
    root, handler = logging.getLogger(), PostLog(rank, post, threading.get_ident())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
