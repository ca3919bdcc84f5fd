"""Which of the host's cores a worker computes on, and which it waits on.

    cores          0       1       0       1            of four workers on two cores, for example
    workers    rank 0  rank 1  rank 2  rank 3

A worker that waits for a message is woken by its sender, and the system likes to put it on the sender's core, behind
it: a virtual machine's idle core counts as one that the host has taken away. So while it waits, a worker keeps to its
share of the cores, as long as that is idle most of the time; when it is awake it may run anywhere. Where the share is
busy the system knows better than we do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from engine.environment import cores, ranks_per_host
from engine.job import Job
from engine.transport.waits import ANYWHERE, T, Waits

FIRST_REVIEW_S = 0.1  # from the first look at how busy the share is to the second
REVIEW_S = 1.0  # between later ones
REVIEW_SHARE = 1e-3  # of the time, at most, that may go into looking
IDLE = 0.75  # of the time: so much makes it worth while to wait for the share
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def threads_per_worker(job: Job) -> int:
    """Threads that torch may use in each worker: as configured, else OMP_NUM_THREADS, else the cores shared out."""
    configured = job.settings.threads_per_worker
    if configured is not None:
        return configured
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    return max(1, cores() // job.world)


def limit_threads(job: Job) -> None:
    """Set the calling thread's number of torch threads."""
    torch.set_num_threads(threads_per_worker(job))


def share_of_cores(place: int, workers: int, threads: int, allowed: Sequence[int]) -> set[int]:
    """The cores of the worker at `place` among `workers` on a host, each with so many threads, of those allowed.

    Cores of its own where there are enough; else they go round, so that neighbours do not share one.
    """
    return {allowed[(place * threads + k) % len(allowed)] for k in range(threads)}


def share_of(job: Job, rank: int) -> set[int]:
    """The share of world rank `rank` of the cores that the calling thread may use."""
    here = ranks_per_host(job.world)
    return share_of_cores(rank % here, here, threads_per_worker(job), sorted(os.sched_getaffinity(0)))


def keep_to_cores(job: Job, rank: int) -> None:
    """Keep the calling thread, and what it starts, to this rank's share of the host's cores, if that is asked for."""
    if job.settings.pin_workers == "always":
        os.sched_setaffinity(0, share_of(job, rank))


def waits_of(job: Job, rank: int) -> Waits:
    """How world rank `rank` waits for messages: on its share of the cores, unless otherwise configured."""
    if job.settings.pin_workers == "waiting" and hasattr(os, "sched_setaffinity"):
        share = share_of(job, rank)
        if share < os.sched_getaffinity(0):
            return WaitingCores(share)
    return ANYWHERE


def idle_seconds() -> Mapping[int, float]:
    """Of each core of the host, how long it has been idle since some moment; empty where the system does not say."""
    try:
        with Path("/proc/stat").open(encoding="ascii", errors="replace") as file:
            return _read_idle(file)
    except OSError:
        return {}


def _read_idle(lines: Iterable[str]) -> dict[int, float]:
    """`cpuN user nice system idle iowait ...`, in ticks; the cores come first."""
    found: dict[int, float] = {}
    for line in lines:
        name, *ticks = line.split()
        if not name.startswith("cpu"):
            break
        if name != "cpu" and len(ticks) > 4:
            found[int(name[3:])] = (int(ticks[3]) + int(ticks[4])) * _TICK_S
    return found


class WaitingCores(Waits):
    """Waits on a share of the cores while that is mostly idle, anywhere else.

    A thread whose cores were chosen from outside (`taskset -p`) since this was made keeps to those.
    """

    def __init__(
        self,
        share: set[int],
        idle: Callable[[], Mapping[int, float]] = idle_seconds,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.share = share
        self.quiet = False  # until it was looked at twice
        self._allowed = os.sched_getaffinity(0)
        self._bringing: list[int] = []  # native numbers of the threads that bring what is waited for
        self._idle, self._now = idle, now
        self._seen: tuple[float, float] | None = None  # the last look: when, and the idle seconds then
        self._due = now()

    def also(self, threads: Sequence[int]) -> None:
        """Keep `threads` to the share as long as it is quiet, whether they wait or not."""
        self._bringing += threads

    def keep(self, wait: Callable[[], T]) -> T:
        """Call `wait`, the calling thread kept to the share meanwhile where that is quiet."""
        if self._now() >= self._due:
            self.review()
        if not self.quiet or not self._moved(0, self._allowed, self.share):
            return wait()
        try:
            return wait()
        finally:
            self._moved(0, self.share, self._allowed)

    def _moved(self, thread: int, before: set[int], after: set[int]) -> bool:
        """Whether a thread may run on other cores now: not where somebody else has chosen some for it meanwhile."""
        try:
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, after)
                return True
        except OSError:  # the cores that this process may use are others now, or the thread has gone
            pass
        return False

    def review(self) -> None:
        """Look at how idle the share has been since the last look."""
        begun = self._now()
        told = self._idle()
        idle = sum(told.get(core, 0.0) for core in self.share)
        if self._seen is not None:
            since, before = self._seen
            self._decide(idle - before >= IDLE * len(self.share) * (begun - since))
        ended = self._now()
        pause = FIRST_REVIEW_S if self._seen is None else REVIEW_S
        self._seen, self._due = (begun, idle), ended + max(pause, (ended - begun) / REVIEW_SHARE)

    def _decide(self, quiet: bool) -> None:
        if quiet != self.quiet:
            self.quiet = quiet
            now, then = (self._allowed, self.share) if quiet else (self.share, self._allowed)
            for thread in self._bringing:
                self._moved(thread, now, then)
