"""Workers for the launcher's tests: each takes (job, rank, where to meet, post), as the real one does."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.job import Job
from engine.pipeline.communicators import Communicators
from engine.plan.actions import Action, Op, Placement
from engine.plan.lowering import lower
from engine.plan.schedules import build
from engine.settings import DataParallelSettings, PipelineSettings, Settings
from engine.telemetry import position
from engine.telemetry.records import encode
from engine.training.connect import connect, store_in
from engine.training.connections import connections
from engine.transport import PeerLost, PeerTimeout

Post = Callable[[bytes], None]


def job_of(ranks: int = 3, replicas: int = 1, **settings: Any) -> Job:
    program = build("gpipe", ranks, 4)
    asked = Settings(
        pipeline=PipelineSettings(ranks, 4), data_parallel=DataParallelSettings(replicas), timeout_s=5.0, **settings
    )
    lowered = lower(program, reduce=False, step=True)
    return Job(asked, Placement.linear(ranks), (), tuple(range(ranks)), 32, 0, program, {4: lowered}, {}, {})


def _hello(rank: int, post: Post) -> None:
    post(encode("ready", {"rank": rank, "pid": os.getpid(), "device": "cpu", "threads": torch.get_num_threads()}))


def good(job: Job, rank: int, meeting: Any, post: Post) -> None:
    _hello(rank, post)
    logging.getLogger("user").info("hello from %d", rank)
    post(encode("done", {"rank": rank}))


def kept(job: Job, rank: int, meeting: Any, post: Post) -> None:
    """Tells which cores it may use."""
    _hello(rank, post)
    logging.getLogger("user").info("cores %s", sorted(os.sched_getaffinity(0)))
    post(encode("done", {"rank": rank}))


def silent(job: Job, rank: int, meeting: Any, post: Post) -> None:
    """Rank 1 returns without having said that it is done."""
    good(job, rank, meeting, post) if rank != 1 else None


def raises(job: Job, rank: int, meeting: Any, post: Post) -> None:
    """Rank 1 raises in 1B2; the others see its end a little later, or are told of it first."""
    _hello(rank, post)
    if rank == 1:
        time.sleep(0.1)
        error = ArithmeticError("the loss is not finite")
        position.locate(error, position.Place(1, 2, "1B2"))
        raise error
    raise PeerLost("rank 1 closed its end", 1)


def killed(job: Job, rank: int, meeting: Any, post: Post) -> None:
    """Rank 1 is killed in 1F3 while the others are busy and deaf to SIGTERM."""
    _hello(rank, post)
    if rank == 1:
        position.here()[0] = Action(1, Op.F, 3).pack()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def interrupted(job: Job, rank: int, meeting: Any, post: Post) -> None:
    """Somebody sends SIGINT to rank 0 alone."""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def keyboard(job: Job, rank: int, meeting: Any, post: Post) -> None:
    if rank == 0:
        raise KeyboardInterrupt
    time.sleep(60)


def leaves(job: Job, rank: int, meeting: Any, post: Post) -> None:
    sys.exit(0) if rank == 0 else time.sleep(60)


def frozen(job: Job, rank: int, meeting: Any, post: Post) -> None:
    """Rank 2 stops; rank 1 waits for it and rank 0 for rank 1, each until its time limit."""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2 * (rank + 1))
    raise PeerTimeout(f"nothing from rank {rank + 1} for 1 s", rank + 1)


def with_children(job: Job, rank: int, meeting: Any, post: Post) -> None:
    """A child of each worker, as a data loader has, and no end."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    post(encode("ready", {"rank": rank, "pid": os.getpid(), "device": "cpu", "threads": child.pid}))
    time.sleep(60)


def wired(job: Job, rank: int, folder: str, post: Post) -> None:
    """Opens all that the job needs, sums over it, and logs the TCP ports that this process listens on."""
    _hello(rank, post)
    transport = connect(job, rank, store_in(folder, job.settings.timeout_s))
    wiring = Communicators(connections(job), transport)
    total = torch.ones(1)
    wiring.sum_over_pipeline(total)
    wiring.sum_counts(total)()
    logging.getLogger("user").info("%s on ports %s", total.item(), sorted(_ports()))
    wiring.sum_over_pipeline(total)  # nobody has left before
    transport.close()
    post(encode("done", {"rank": rank}))


def _ports() -> set[int]:
    """The TCP ports on which this process listens, as the system sees it."""
    names = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            names.add(str(each.readlink()))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in names}
