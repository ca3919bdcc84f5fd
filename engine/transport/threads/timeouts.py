"""How threads wait for each other: up to a time limit, and not at all once the run is aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from engine.transport import PeerLost, PeerTimeout


class Timeouts:
    """The waits of one run's threads: each limited to `timeout_s`, all ended by `abort`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.aborted = False
        self._lock = threading.Lock()
        self._conditions: list[threading.Condition] = []

    def condition(self) -> threading.Condition:
        """Return a new condition to wait on, which `abort` wakes."""
        condition = threading.Condition(threading.Lock())
        with self._lock:
            self._conditions.append(condition)
        return condition

    def abort(self) -> None:
        """End every wait, present and future, with PeerLost; from any thread."""
        self.aborted = True
        with self._lock:
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, done: Callable[[], bool], what: str, peer: int | None) -> None:
        """Wait on a held condition until `done()`; `what` and `peer` go into PeerTimeout and PeerLost."""
        deadline = time.monotonic() + self._timeout_s
        while not done():
            if self.aborted:
                raise PeerLost(f"{what}: the run was aborted", peer)
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerTimeout(f"{what}: nothing for {self._timeout_s:g} s", peer)
            condition.wait(left)
