"""One thread per rank that reduces gradients behind the computation.

Reductions run in the order in which they were launched, one at a time: the order of messages follows from the
program, never from timing. The thread is a daemon and ends at the latest with its owner.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

Task = tuple[Callable[[], None], "Future[None]"]


class ReduceThread:
    """A thread that runs what it is given, in order; the reducers of one rank share one."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._tasks,), name="reduce", daemon=True).start()
        self._end = weakref.finalize(self, self._tasks.put, None)

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Queue `work`; its result or exception arrives in the future."""
        future: Future[None] = Future()
        self._tasks.put((work, future))
        return future

    def close(self) -> None:
        """Let the thread end behind what it was given, without waiting for it."""
        self._end()


def _serve(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        work, future = task
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised again by whoever waits
            future.set_exception(error)
        else:
            future.set_result(None)
        del task, work, future  # what was reduced must not outlive its owner
