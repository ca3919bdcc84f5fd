"""Whose clock a rank has, and how far it is from that of rank 0: measured through the store that all ranks reach.

CLOCK_MONOTONIC is common to the processes of a host (of a time namespace, to be exact) and begins anywhere. Of each
group of ranks with one clock the first compares it with rank 0's, by ping-pong:

    leader    t0 ──ping──►                    ◄──pong── t1
    rank 0                  answers, at t

t lies between t0 and t1, so the offset is t - (t0 + t1) / 2, and wrong by (t1 - t0) / 2 at most, however unequal the
two ways are (F. Cristian, "Probabilistic clock synchronization", 1989). The quickest of some exchanges counts. Measured
at the start and at the end of a run, two offsets also give the drift between.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

EXCHANGES = 16


class Offset(NamedTuple):
    """The offset of a rank's clock: `offset_ns` is added to its moments to give rank 0's.

    `at_ns`: when it was measured, on this rank's clock.
    """

    leader: int  # the first rank with this clock
    offset_ns: int
    uncertainty_ns: int
    at_ns: int


def domain() -> str:
    """An identifier of this process's CLOCK_MONOTONIC: equal where two processes share the clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return socket.gethostname()


class Clocks:
    """Compares this rank's clock with rank 0's, through the store.

    Every rank calls `compare` as often as the others and at about the same time. `store`: see `Mailbox`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        own: str | None = None,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store, self._rank, self._world, self._now = store, rank, world, now
        self._own = domain() if own is None else own
        self._rounds = 0

    def compare(self) -> Offset | None:
        """Measure this rank's clock against rank 0's; None where it is the same clock."""
        prefix = f"clock/{self._rounds}"
        self._rounds += 1
        self._store.set(f"{prefix}/domain/{self._rank}", self._own)
        domains = [self._store.get(f"{prefix}/domain/{rank}").decode() for rank in range(self._world)]
        leaders = {name: domains.index(name) for name in dict.fromkeys(domains)}
        if self._rank == 0:
            for leader in leaders.values():
                if leader:
                    self._answer(f"{prefix}/{leader}")
            return None
        leader = leaders[self._own]
        if leader == 0:
            return None
        if leader == self._rank:
            found = self._ask(f"{prefix}/{leader}")
            self._store.set(f"{prefix}/{leader}/found", " ".join(map(str, found)))
        words = self._store.get(f"{prefix}/{leader}/found").decode().split()
        return Offset(leader, *map(int, words))

    def _answer(self, prefix: str) -> None:
        for number in range(EXCHANGES):
            self._store.wait([f"{prefix}/ping{number}"])
            self._store.set(f"{prefix}/pong{number}", str(self._now()))

    def _ask(self, prefix: str) -> tuple[int, int, int]:
        """(offset, uncertainty, when)."""
        found = []
        for number in range(EXCHANGES):
            asked = self._now()
            self._store.set(f"{prefix}/ping{number}", "")
            self._store.wait([f"{prefix}/pong{number}"])
            heard = self._now()
            there = int(self._store.get(f"{prefix}/pong{number}"))
            found.append(((heard - asked + 1) // 2, there - (asked + heard) // 2, heard))
        uncertainty, offset, when = min(found)
        return offset, uncertainty, when
