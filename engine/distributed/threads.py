"""Ranks as threads of one process: the same loop that torchrun starts as processes, on a laptop and in a test.

    def loop() -> None:
        pipeline = engine.Pipeline(model(), loss, ranks=2)
        ...

    engine.run_threads(2, loop)

Threads share torch's default generators, so what a rank does before it meets the others (building a model from a
seed) is done by one rank after another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]

from engine.distributed.world import PATIENCE_S, TIMEOUT_S, World, bind
from engine.transport import PeerError, PeerLost
from engine.transport.threads import ThreadHub

T = TypeVar("T")
_LEAVE_S = 10.0  # for the other threads, after one that failed: a thread cannot be killed


def run_threads(ranks: int, main: Callable[..., T], *args: Any, timeout_s: float = TIMEOUT_S) -> list[T]:
    """Call `main(*args)` once per rank, each in a thread of its own; what they return, in rank order.

    Within, `engine.Pipeline`, `engine.rank()` and all else of the engine see this rank of `ranks`. The first exception
    of a rank that is no consequence of another's is raised here. `timeout_s` limits every wait for another rank.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks={ranks!r} must be a whole number, at least 1")
    run = _Run(ranks, timeout_s)
    threads = [run.thread(rank, main, args) for rank in range(ranks)]
    try:
        for rank, thread in enumerate(threads):
            thread.start()
            run.arrived[rank].wait()
        for thread in threads:
            while thread.is_alive() and not run.hub.aborted:
                thread.join(0.1)
    finally:
        if any(thread.is_alive() for thread in threads):
            run.hub.abort()
        for event in run.arrived:
            event.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_LEAVE_S)
    if run.errors:
        raise next((error for error in run.errors if not isinstance(error, PeerError)), run.errors[0])
    return run.results


class _Run:
    """What the threads of one call share."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self.hub, self.errors = ThreadHub(ranks, timeout_s), []  # type: ignore[var-annotated]
        self.results: list[Any] = [None] * ranks
        self.arrived = [threading.Event() for _ in range(ranks)]  # at the first call that meets others, or at the end
        self._store = HashStore()
        self._absent: list[int] = []  # ranks that ended without having met the others

    def thread(self, rank: int, main: Callable[..., Any], args: tuple[Any, ...]) -> threading.Thread:
        """The thread of a rank, not yet started."""
        return threading.Thread(target=self.rank, args=(rank, main, args), name=f"rank {rank}", daemon=True)

    def rank(self, rank: int, main: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """What the thread of one rank does."""
        world: World | None = None

        def join() -> World:
            nonlocal world
            if world is None:
                self.arrived[rank].set()
                for other in self.arrived:
                    other.wait()
                if self._absent:  # what all ranks note of their calls would be waited for in vain
                    raise PeerLost("another rank ended before it met the others", self._absent[0])
                world = World(self.hub.transport(rank), self._store, PATIENCE_S)
            return world

        bind(join)
        try:
            self.results[rank] = main(*args)
        except BaseException as error:  # noqa: BLE001  # raised by whoever called run_threads
            self.errors.append(error)
            self.hub.abort()
        finally:
            bind(None)
            if world is None:
                self._absent.append(rank)
            self.arrived[rank].set()
            if world is not None:
                world.close()
