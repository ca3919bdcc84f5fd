"""Ranks that torchrun (or anything that sets its environment variables) started: join them, start nothing.

    rank 0      runs the command line: prepares the job, hands it out, records the run; its own worker is a thread
                beside that
    the others  wait for the job, work in a thread, post their records

The job is data (`handover.py`), but data that names code. On one host it comes from rank 0's own socket, for whose user
the kernel vouches (`delivery.py`), and records go back the same way. Between hosts both go through the launcher's
store, into which whoever reaches it can write: there a rank takes no job that names other code than its own command
line does, and finds modules in the folder that it was started from itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, DistStoreError

from engine import environment
from engine.errors import Interrupted
from engine.files import UnwritableError, write_text
from engine.job import Job
from engine.launch import delivery, handover, interrupt
from engine.launch.failure_report import FailureReport, Outcome
from engine.launch.mailbox import Mailbox
from engine.launch.rank import Post, forward_logging, guarded, thread_logging, work
from engine.launch.supervise import PEER_GRACE_S, SURE_GRACE_S, OnRecord
from engine.settings import Settings
from engine.short_summary import write_short_summary
from engine.targets import named
from engine.telemetry import position
from engine.telemetry.clock import Clocks
from engine.telemetry.records import decode, encode
from engine.training.connect import connect
from engine.training.cores import keep_to_cores, limit_threads
from engine.transport import rendezvous

START_TIMEOUT = timedelta(minutes=30)  # for rank 0 to prepare the job; the launcher ends us if rank 0 dies
TELL_S = 60.0  # between two lines that say so
POLL_S = 0.02
LEAVE_GRACE_S = 5.0
JOB, CLOSED, LEFT = "job", "closed", "left"
LOST = "rank 0 went away: see what it said last, and what the launcher says of it"

Targets = Callable[[], Mapping[str, Any]]  # what a rank's own command line names as code: path -> `_target_`


class JoinedRank:
    """This process's place among those that the launcher started.

    ValueError where they do not come together.
    """

    def __init__(self, limit_s: float) -> None:
        self.place = rendezvous.meet(limit_s)
        self.rank, self.world = self.place.rank, self.place.world
        self.place.root.set_timeout(START_TIMEOUT)
        self.store = self.place.store()
        self.sent = False
        self._counter: delivery.Counter | None = None
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lost = 0  # ranks that will not say that they leave
        self._over = threading.Event()  # rank 0 may go now
        self._job: Job | None = None  # of the others: what they were handed, and where all ranks are
        self._positions: memoryview | None = None

    # -- rank 0 ----------------------------------------------------------------------------------------------------

    def close(self, exit_code: int, message: str | None) -> None:
        """Let the others leave: all is reported. `exit_code` is theirs where there was no job for them. Rank 0 only.

        Not before: as soon as one rank has failed, a launcher ends the others, rank 0 among them.
        """
        with contextlib.suppress(DistError):  # nobody is reached any more
            if not self.sent:
                self._hand_out(encode("dismissed", {"exit_code": exit_code, "message": message}))
            self._see_off()

    def lead(self, job: Job, on_record: OnRecord) -> Outcome:
        """Rank 0: hand out the job, work in a thread, listen to all. No rank is ended here: the launcher does that."""
        assert job.world == self.world, (job.world, self.world)
        self._hand_out(handover.written(job))
        failures = FailureReport(job.ranks, job.world)
        inbox = self._inbox
        mailbox = None if self._counter else Mailbox(self.place.store(), 0, self.world)
        positions = self._counter.positions if self._counter else None

        def main() -> None:
            if positions is not None:
                position.use(positions[0:1])
            limit_threads(job)
            keep_to_cores(job, 0)
            with thread_logging(0, inbox.put):
                guarded(0, inbox.put, lambda: self._work(job, inbox.put))

        with interrupt.waking(inbox.put):
            threading.Thread(target=main, name="rank 0", daemon=True).start()
            try:
                signum = _Listener(failures, inbox, mailbox, on_record, positions, self._look).run()
            except DistError as error:
                self._lost = self.world
                return Outcome("failed", f"the launcher went away, and its store with it ({_first_line(error)})", 1)
            except _NoRecordError as error:
                self._lost = self.world
                return Outcome("failed", str(error), 1)
        self._lost = len(failures.deaths)
        return failures.outcome(signum)

    def _look(self) -> None:
        """DistError where the launcher's store is gone: there will be nobody to end the ranks."""
        self.store.check([JOB])

    def _hand_out(self, content: bytes) -> None:
        """Once: the job, or what ends the others without one."""
        self.sent = True
        if _within_one_host():
            self._counter = delivery.Counter(self.world)
            self._counter.open(content, self._inbox.put, lambda rank: self._inbox.put(_Gone(rank)))
            content = self._counter.name.encode()
        self.store.set(JOB, content)

    def _see_off(self) -> None:
        """Let the others go, and stay a moment: the store may live in this process."""
        self.store.set(CLOSED, b"")
        deadline = time.monotonic() + LEAVE_GRACE_S
        while self.store.add(LEFT, 0) < self.world - 1 - self._lost and time.monotonic() < deadline:
            time.sleep(POLL_S)

    # -- the others ------------------------------------------------------------------------------------------------

    def follow(self, own: Targets) -> int:
        """Every other rank: wait for the job, do this rank's part; returns the exit code.

        The work is done in a thread, so that a signal is heard whatever the rank waits for.
        """
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        mail = delivery.Mail(Mailbox(self.place.store(), self.rank, self.world).post)

        def main() -> None:
            try:
                code = self._follow(own, mail, inbox.put)
            except (DistError, OSError) as error:
                code = self._say(f"{LOST} ({type(error).__name__})")
            except (ValueError, RuntimeError) as error:
                code = self._say(f"error: {error}")
            inbox.put(code)

        with interrupt.waking(lambda signum: inbox.put(Interrupted(signum))):
            threading.Thread(target=main, name=f"rank {self.rank}", daemon=True).start()
            event = inbox.get()
        if isinstance(event, int):
            return event
        if isinstance(event, Interrupted):
            self._post_end(mail, event.signum)
        else:
            self._say(LOST)
            self._report_rank_0()
        sys.stdout.flush()
        os._exit(event.exit_code if isinstance(event, Interrupted) else 1)  # the thread may be anywhere

    def _report_rank_0(self) -> None:
        """The end of the run in its folder, where the rank that writes there was killed. Every other rank may do it."""
        job, positions = self._job, self._positions
        if job is None or positions is None:
            return
        folder = Path(job.run_dir)
        if not folder.is_dir() or (folder / "summary.json").exists():
            return
        failures = FailureReport(job.ranks, job.world)
        failures.add_death(0, None, position.decode(positions[0]))
        message = failures.message()
        with contextlib.suppress(UnwritableError):
            write_text(folder / "error.txt", message + "\n")
            write_short_summary(folder, "failed", message, job.settings)

    def _follow(self, own: Targets, mail: delivery.Mail, put: Callable[[Any], None]) -> int:
        content, post = self._receive(mail, put), mail.post
        if decode(content).kind == "dismissed":
            answer = decode(content).meta
            if answer["message"]:
                self._say(f"error: {answer['message']}")
            code = int(answer["exit_code"])
        else:
            job = self._job = handover.read(content)
            if not _within_one_host():
                job = replace(job, start_dir=str(Path.cwd()))
                check_targets(job.settings, own(), self.rank)
            forward_logging(self.rank, post)
            limit_threads(job)
            keep_to_cores(job, self.rank)
            code = 0 if guarded(self.rank, post, lambda: self._work(job, post)) else 1
        self._leave()
        return code

    def _receive(self, mail: delivery.Mail, put: Callable[[Any], None]) -> bytes:
        """What rank 0 hands out; from then on `put` hears of rank 0's end."""
        self._await(JOB)
        content: bytes = self.store.get(JOB)
        if not _within_one_host():
            return content
        content, positions, end = delivery.fetch(content.decode(errors="replace"), self.rank)
        position.use(positions[self.rank : self.rank + 1])
        self._positions = positions
        mail.use(end)

        def watch() -> None:
            end.recv(1)  # nothing comes, until its end
            if not self._over.is_set():
                put(_Gone(0))

        threading.Thread(target=watch, daemon=True, name="rank 0 watch").start()
        return content

    def _await(self, key: str) -> None:
        """Wait for rank 0 to set `key`, and say so from time to time."""
        begun = time.monotonic()
        while time.monotonic() - begun < START_TIMEOUT.total_seconds():
            try:
                self.store.wait([key], timedelta(seconds=TELL_S))
                return
            except DistStoreError:  # its limit is over; that the store is gone is another error
                self._say(f"waiting for rank 0 to prepare the job ({time.monotonic() - begun:.0f} s)")
        raise ValueError(f"rank 0 has prepared no job within {START_TIMEOUT}: see what it does")

    def _say(self, text: str) -> int:
        print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
        return 1

    def _post_end(self, mail: delivery.Mail, signum: int) -> None:
        """Tell rank 0 that a signal ends this rank; in a thread, since rank 0 or the store may answer no more."""

        def post() -> None:
            with contextlib.suppress(DistError, OSError):
                mail.post(encode("ended", {"rank": self.rank, "signum": signum}))
                self.place.store().add(LEFT, 1)

        told = threading.Thread(target=post, daemon=True)
        told.start()
        told.join(1.0)

    def _work(self, job: Job, post: Post) -> None:
        clocks = None if environment.one_host() else Clocks(self.place.store(), self.rank, self.world)
        work(job, self.rank, connect(job, self.rank, self.place.store()), post, clocks)

    def _leave(self) -> None:
        """Stay until rank 0 has read what was posted: a launcher ends the other ranks as soon as one has failed."""
        try:
            self.store.wait([CLOSED], START_TIMEOUT)
            self._over.set()
            self.store.add(LEFT, 1)
        except DistError:
            pass  # rank 0 and its store are gone already


class _NoRecordError(RuntimeError):
    """What was posted is no record of a rank's."""


class _Gone:
    """A rank's process has ended."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def check_targets(settings: Settings, own: Mapping[str, Any], rank: int) -> None:
    """Raise ValueError where a job that came over the network names other code than this rank's command line."""
    asked = named(asdict(settings))
    for path in sorted(asked.keys() | own.keys()):
        if asked.get(path) != own.get(path):
            raise ValueError(
                f"rank 0's job has {path}={asked.get(path)}, and the command line of rank {rank} {path}="
                f"{own.get(path)}: between hosts a rank runs only code that its own command line names; start all "
                "ranks with the same one"
            )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _within_one_host() -> bool:
    return environment.one_host() and delivery.available()


class _Listener:
    """Rank 0 hears all ranks, until each has said its last, or there is a reason to wait no longer."""

    def __init__(
        self,
        failures: FailureReport,
        inbox: queue.SimpleQueue[Any],
        mailbox: Mailbox | None,
        on_record: OnRecord,
        positions: memoryview | None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._failures, self._inbox, self._mailbox, self._on_record = failures, inbox, mailbox, on_record
        self._positions, self._look = positions, look
        self._left = set(range(failures.world))  # ranks that may have more to say
        self._ended: dict[int, int] = {}  # rank -> the signal that ended it, as it said itself
        self._deadline, self._signum = float("inf"), None  # type: float, int | None

    def run(self) -> int | None:
        """Returns the number of the signal that interrupted the run, or None."""
        while self._left and time.monotonic() < self._deadline:
            if not self._hear():
                self._look()
                time.sleep(POLL_S)
        self._conclude()
        return self._signum

    def _hear(self) -> bool:
        """All that has arrived; whether anything had."""
        events: list[Any] = []
        while not self._inbox.empty():
            events.append(self._inbox.get())
        posted = [] if self._mailbox is None else self._mailbox.take()
        records = [*posted, *(event for event in events if isinstance(event, bytes))]
        for record in records:  # first: who says something before its end has not gone without a word
            self._take(record)
        for event in events:
            if isinstance(event, int):  # others may have failed a moment before: that would be why we are ended
                self._signum = self._signum or event
                self._within(PEER_GRACE_S if self._positions is not None else SURE_GRACE_S)
            elif isinstance(event, _Gone) and event.rank in self._left:
                self._left.discard(event.rank)
                self._failures.add_death(event.rank, None, self._last(event.rank))
                self._within(SURE_GRACE_S)
        if self._signum is not None and self._left == {0}:  # this process's own worker need not end first
            self._within(0)
        return bool(records or events)

    def _take(self, content: bytes) -> None:
        try:
            record = decode(content)
        except ValueError as error:
            raise _NoRecordError(
                f"somebody else than this run's ranks writes into the launcher's store: {error}"
            ) from None
        if record.kind == "ended":
            self._left.discard(record.meta["rank"])
            self._ended[record.meta["rank"]] = record.meta["signum"]
            self._within(PEER_GRACE_S)  # for the same signal to come here
            return
        if record.kind in ("done", "error"):
            self._left.discard(record.meta["rank"])
        if record.kind == "clock":
            self._failures.add_clock(record.meta)
        if record.kind == "error":
            self._failures.add_error(record.meta)
            self._within(SURE_GRACE_S if self._failures.certain else PEER_GRACE_S)
        self._on_record(record)

    def _within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _last(self, rank: int) -> Any:
        """What a rank was last seen doing."""
        return None if self._positions is None else position.decode(self._positions[rank])

    def _conclude(self) -> None:
        """What the ends of several ranks mean together."""
        failures = self._failures
        for rank in range(failures.world):
            if (last := self._last(rank)) is not None:
                failures.positions.setdefault(rank, last)
        if self._signum is None:  # it was meant for those ranks alone
            for rank, signum in self._ended.items():
                failures.add_death(rank, -signum, self._last(rank))
        elif self._ended and not failures.certain:  # what ranks saw of others that the same signal ended
            failures.errors = [meta for meta in failures.errors if meta["peer"] not in {*self._ended, None}]


_meeting: JoinedRank | None = None


def meeting(limit_s: float = Settings.timeout_s) -> JoinedRank:
    """Return this process's place among the launcher's ranks; connects at the first call, within `limit_s`."""
    global _meeting  # noqa: PLW0603  # one process takes part in one meeting
    _meeting = _meeting or JoinedRank(limit_s)
    return _meeting
