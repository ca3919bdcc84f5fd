"""Ranks that torchrun (or anything that sets its environment variables) started: join them, start nothing.

    rank 0      reads the command line, prepares the job, sends it through the launcher's store, records the run;
                its own worker is a thread beside that
    the others  ignore the command line, wait for the job, work, post their records through the store

The job is the one thing that is pickled: once, before any work, from rank 0 to the processes of the same program that
the same launcher started.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from engine.job import Job
from engine.records import decode, encode
from engine.runtime import interrupt
from engine.runtime.clock import Clocks
from engine.runtime.cores import keep_to_cores, limit_threads
from engine.runtime.environment import one_host
from engine.runtime.mailbox import Mailbox
from engine.runtime.meet import connect
from engine.runtime.rank import Post, forward_logging, guarded, thread_logging, work
from engine.runtime.supervise import PEER_GRACE_S, SURE_GRACE_S, OnRecord
from engine.runtime.verdict import Outcome, Verdict

START_TIMEOUT = timedelta(minutes=30)  # for rank 0 to prepare the job; the launcher ends us if rank 0 dies
POLL_S = 0.02
LEAVE_GRACE_S = 5.0
JOB, CLOSED, LEFT = "engine/job", "engine/closed", "engine/left"


class Meeting:
    """This process's place among those that the launcher started."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store: Any = next(rendezvous("env://", self.rank, self.world, timeout=START_TIMEOUT))[0]
        self.sent = False

    # -- rank 0 ----------------------------------------------------------------------------------------------------

    def close(self, exit_code: int, message: str | None) -> None:
        """Rank 0 has reported all: the others may leave, with this exit code where there was no job for them.

        Not before: as soon as one rank has failed, a launcher ends the others, rank 0 among them.
        """
        if not self.sent:
            self.store.set(JOB, b"-" + encode("dismissed", {"exit_code": exit_code, "message": message}))
        self._see_off()

    def lead(self, job: Job, on_record: OnRecord) -> Outcome:
        """Rank 0: send the job, work in a thread, listen to all. No rank is ended here: the launcher does that."""
        assert job.world == self.world, (job.world, self.world)
        self.sent = True
        self.store.set(JOB, b"+" + pickle.dumps(job))
        verdict = Verdict(job.ranks, job.world)
        inbox: queue.SimpleQueue[bytes | int] = queue.SimpleQueue()
        mailbox = Mailbox(self.store.clone(), 0, self.world)

        def main() -> None:
            limit_threads(job)
            keep_to_cores(job, 0)
            with thread_logging(0, inbox.put):
                guarded(0, inbox.put, lambda: self._work(job, inbox.put))

        with interrupt.waking(inbox.put):
            threading.Thread(target=main, name="rank 0", daemon=True).start()
            signum = _listen(verdict, inbox, mailbox, on_record)
        return verdict.outcome(signum)

    def _see_off(self) -> None:
        """Let the others go, and stay a moment: the store may live in this process."""
        self.store.set(CLOSED, b"")
        deadline = time.monotonic() + LEAVE_GRACE_S
        while self.store.add(LEFT, 0) < self.world - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S)

    # -- the others ------------------------------------------------------------------------------------------------

    def follow(self) -> int:
        """Every other rank: wait for the job, do this rank's part; returns the exit code."""
        content = self.store.get(JOB)
        if content[:1] == b"-":
            answer = decode(content[1:]).meta
            if answer["message"]:
                print(f"rank {self.rank}: error: {answer['message']}", file=sys.stderr, flush=True)
            code = int(answer["exit_code"])
        else:
            job: Job = pickle.loads(content[1:])
            post = Mailbox(self.store.clone(), self.rank, self.world).post
            forward_logging(self.rank, post)
            limit_threads(job)
            keep_to_cores(job, self.rank)
            succeeded = guarded(self.rank, post, lambda: self._work(job, post))
            code = 0 if succeeded else 1
        self._leave()
        return code

    def _work(self, job: Job, post: Post) -> None:
        clocks = None if one_host() else Clocks(self.store.clone(), self.rank, self.world)
        work(job, self.rank, connect(job, self.rank, self.store.clone()), post, clocks)

    def _leave(self) -> None:
        """Stay until rank 0 has read what was posted: a launcher ends the other ranks as soon as one has failed."""
        try:
            self.store.wait([CLOSED], START_TIMEOUT)
            self.store.add(LEFT, 1)
        except DistError:
            pass  # rank 0 and its store are gone already


def _listen(
    verdict: Verdict, inbox: queue.SimpleQueue[bytes | int], mailbox: Mailbox, on_record: OnRecord
) -> int | None:
    left = set(range(verdict.world))
    deadline, signum = float("inf"), None
    while left and time.monotonic() < deadline:
        arrived: list[bytes | int] = [*mailbox.take()]
        while not inbox.empty():
            arrived.append(inbox.get())
        for event in arrived:
            if isinstance(event, int):  # others may have failed a moment before: that would be why we are ended
                signum, deadline = signum or event, min(deadline, time.monotonic() + SURE_GRACE_S)
                continue
            record = decode(event)
            if record.kind in ("done", "error"):
                left.discard(record.meta["rank"])
            if record.kind == "clock":
                verdict.add_clock(record.meta)
            if record.kind == "error":
                verdict.add_error(record.meta)
                grace = SURE_GRACE_S if verdict.certain else PEER_GRACE_S
                deadline = min(deadline, time.monotonic() + grace)
            on_record(record)
        if not arrived:
            time.sleep(POLL_S)
    return signum


_meeting: Meeting | None = None


def meeting() -> Meeting:
    """The meeting of this process; connects at the first call."""
    global _meeting  # noqa: PLW0603  # one process takes part in one meeting
    _meeting = _meeting or Meeting()
    return _meeting
