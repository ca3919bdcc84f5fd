"""Workers as processes of this parent: start, listen, and leave nothing behind.

    parent ──fork server──► worker 0..N-1        one process group each: Ctrl-C in a terminal reaches the parent only
       ▲                      │
       └────── one pipe ──────┘                  records (bytes, no pickles); its end of file is the worker's end

The fork server imports torch once and forks workers in milliseconds, also for the later jobs of a sweep. The parent
sleeps until a pipe, a process's end or a signal wakes it. A worker whose parent dies kills its own group, so that the
children of its data loader go with it.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.errors import ExhaustedError
from engine.job import Job
from engine.launch import handover, interrupt
from engine.launch.ending import Ending
from engine.launch.failure_report import FailureReport, ended
from engine.telemetry import position
from engine.telemetry.records import Record, decode

SURE_GRACE_S = 0.3  # after an error that is a cause: another rank may have failed a moment earlier
PEER_GRACE_S = 3.0  # after an error that is only an effect: the cause may still be on its way
TERM_GRACE_S = 1.0  # between SIGTERM and SIGKILL
LEAVE_GRACE_S = 3.0  # between the last `done` and the end of a worker
UNKNOWN_EXIT = 255  # what multiprocessing gives for a process whose end the fork server did not report
FORK_SERVER_GRACE_S, POLL_S = 1.0, 0.01  # between the moment that its files are closed and its end

# (job, rank, where to meet, post): runs one rank and raises on failure. Importable, since a worker imports it anew.
Entry = Callable[[Job, int, Any, Callable[[bytes], None]], None]
OnRecord = Callable[[Record], None]


def context() -> Any:
    """Return the fork server's context; torch and the worker are imported in it before the first fork.

    So is what torch imports in the first backward: each worker would import it by itself.
    """
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # Somebody's own way to start processes, like joblib's; a worker would be told it, and not know it.
        multiprocessing.set_start_method("forkserver", force=True)
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(
        ["engine.launch.process", "engine.training.worker", "torch.fx.experimental.symbolic_shapes"]
    )
    return forkserver


def warm_up() -> None:
    """Start the fork server now, so that it imports torch while the parent prepares the run."""
    from multiprocessing import forkserver

    context()
    # Ctrl-C in a terminal reaches the fork server too, which importing torch would end with a traceback of its own.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def cool_down() -> None:
    """End the fork server of this process at once: it would finish its imports first, and hold the terminal."""
    from multiprocessing import forkserver

    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def fork_server_end(wait_s: float) -> str | None:
    """Describe how the fork server ended, where it has, or does within `wait_s`; it is left to be reaped."""
    from multiprocessing import forkserver

    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    deadline = time.monotonic() + wait_s
    while pid is not None:
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return f"the fork server (process {pid}) has ended"
        if found is not None:
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            return f"the fork server (process {pid}) {ended(code)}"
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    return None


@dataclass
class WorkerProcess:
    """A worker's process, the pipe that its records come through, and what it has said of its end."""

    rank: int
    process: Any
    pipe: Connection
    done: bool = False  # posted `done`
    reported: bool = False  # posted `error`
    open: bool = True  # its pipe may bring more


@dataclass
class Supervisor:
    """Starts one process per rank and stays until all have ended. Use `run` once."""

    job: Job
    on_record: OnRecord
    entry: Entry
    meeting: Any  # handed to every entry: where the ranks find each other
    failures: FailureReport = field(init=False)
    ending: Ending = field(init=False)
    workers: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.failures = FailureReport(self.job.ranks, self.job.world)
        self.ending = Ending(self.job, self.on_record)

    def run(self) -> int | None:
        """Run all workers; return the number of the signal that interrupted the run, or None. See `failures`."""
        reader, writer = os.pipe()
        try:
            with interrupt.waking(lambda signum: _write(writer, signum)):
                try:
                    self._start()
                    return self._listen(reader)
                finally:
                    self._note_positions()
                    self._stop()
        finally:
            os.close(reader)
            os.close(writer)

    def _start(self) -> None:
        warm_up()
        forkserver, given = context(), handover.written(self.job)
        try:
            self._positions: MutableSequence[int] = forkserver.RawArray("q", [position.NOWHERE] * self.job.world)
        except OSError as error:
            raise ExhaustedError(
                error.errno,
                f"no memory that processes share can be had ({error}): make room in /dev/shm, or use launch=threads",
            ) from error
        for rank in range(self.job.world):
            try:
                self._start_one(forkserver, rank, given)
            except (OSError, EOFError) as error:  # EOFError: the fork server has ended
                if how := fork_server_end(FORK_SERVER_GRACE_S if isinstance(error, EOFError | ConnectionError) else 0):
                    raise OSError(f"{how} while it started rank {rank}; start the run again") from error
                raise OSError(_not_started(rank, self.job.world, error)) from error

    def _start_one(self, forkserver: Any, rank: int, given: bytes) -> None:
        from engine.launch import process

        reader, writer = forkserver.Pipe(duplex=False)
        arguments = (self.entry, given, rank, self.meeting, writer, self._positions)
        child = forkserver.Process(target=process.main, args=arguments, name=f"rank {rank}")
        child.start()
        writer.close()
        self.workers.append(WorkerProcess(rank, child, reader))

    # -- listening -------------------------------------------------------------------------------------------------

    def _listen(self, signals: int) -> int | None:
        deadline: float | None = None
        while True:
            if deadline is None and self.failures.failed:
                deadline = time.monotonic() + PEER_GRACE_S
            elif deadline is None and all(w.done for w in self.workers):
                deadline = time.monotonic() + LEAVE_GRACE_S
            if self.failures.certain and deadline is not None:
                deadline = min(deadline, time.monotonic() + SURE_GRACE_S)
            if not self._running() or (deadline is not None and time.monotonic() >= deadline):
                return None
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([signals, *self._sources()], timeout)
            if signals in ready:
                signum = os.read(signals, 1)[0]
                if not self.ending.ask(signum):
                    return signum
            for worker in self.workers:
                self._hear(worker, ready)

    def _running(self) -> bool:
        return any(not (w.done or w.reported) or w.open for w in self.workers if w.rank not in self.failures.deaths)

    def _sources(self) -> list[Any]:
        pipes: list[Any] = [w.pipe for w in self.workers if w.open]
        return pipes + [w.process.sentinel for w in self.workers if w.open]

    def _hear(self, worker: WorkerProcess, ready: list[Any]) -> None:
        ended = worker.process.sentinel in ready
        if worker.open and (ended or worker.pipe in ready):
            self._read(worker, to_the_end=ended)
            if ended or not worker.open:
                self._closed(worker)

    def _read(self, worker: WorkerProcess, to_the_end: bool) -> None:
        """One record, or all there are: never more than is there, its loader's children may hold the pipe open."""
        try:
            while worker.pipe.poll():
                self._take(worker, decode(worker.pipe.recv_bytes()))
                if not to_the_end:
                    return
        except (EOFError, ConnectionError):
            worker.open = False

    def _take(self, worker: WorkerProcess, record: Record) -> None:
        if record.kind == "done":
            worker.done = True
            self.failures.stopped = record.meta.get("stopped")
        elif record.kind == "error":
            worker.reported = True
            self.failures.add_error(record.meta)
        self.on_record(record)

    def _closed(self, worker: WorkerProcess) -> None:
        """The pipe or the process ended: with a record that says so, or without a word."""
        worker.open = False
        if worker.done or worker.reported:
            return
        worker.process.join(LEAVE_GRACE_S)
        code = worker.process.exitcode
        if code == UNKNOWN_EXIT and (how := fork_server_end(FORK_SERVER_GRACE_S)):
            self.failures.helper = (
                f"{how}: it had started the ranks, which cannot go on without it; start the run again"
            )
            return
        last = position.decode(self._positions[worker.rank])
        self.failures.add_death(worker.rank, 0 if code is None else code, last)

    def _note_positions(self) -> None:
        """Where the ranks are that the others may have waited for in vain: said of them where nothing else is known."""
        for worker in self.workers:
            last = position.decode(self._positions[worker.rank])
            if last is not None:
                self.failures.positions.setdefault(worker.rank, last)

    # -- ending ----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End every worker and whatever it started: by itself if all is well, else SIGTERM, a moment, SIGKILL."""
        well = len(self.workers) == self.job.world and all(w.done for w in self.workers)
        for signum, grace_s in ((None, LEAVE_GRACE_S if well else 0.0), (signal.SIGTERM, TERM_GRACE_S)):
            if signum is not None:
                self._signal(signum)
            deadline = time.monotonic() + grace_s
            for worker in self.workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
            if all(w.process.exitcode is not None for w in self.workers):
                break
        self._signal(signal.SIGKILL)
        for worker in self.workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()

    def _signal(self, signum: int) -> None:
        """To each worker's whole group: a group outlives its leader while it has members, so its id is not reused."""
        for worker in self.workers:
            try:
                os.killpg(worker.process.pid, signum)
            except (ProcessLookupError, PermissionError):
                if worker.process.exitcode is None:  # it had no time to become the leader of a group
                    worker.process.kill() if signum == signal.SIGKILL else worker.process.terminate()


def _not_started(rank: int, world: int, error: Exception) -> str:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return (
        f"the process of rank {rank} of {world} could not be started: {type(error).__name__}: {error}. Every rank "
        f"needs memory, a process (ulimit -u: {_limit(processes)}) and some open files (ulimit -n: {_limit(files)}): "
        "raise these limits, or lower pipeline.ranks or data_parallel.replicas"
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _write(fd: int, signum: int) -> None:
    os.write(fd, bytes([signum]))
