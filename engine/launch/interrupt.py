"""Ctrl-C, SIGTERM and SIGHUP: one meaning each, whatever the process is doing at that moment.

    raising()   while there is nothing to protect: the signal becomes an `Interrupted` exception
    waking()    while workers run: the signal becomes one more event to wait for, so that no record is cut in half
    ignored()   while the results are written, which takes a moment and must not be left half done

Handlers can only be set in the main thread; elsewhere the three do nothing. A SIGHUP that was ignored at the start
stays so: a run that was started by `nohup` outlives its terminal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from engine.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def raising() -> Iterator[None]:
    """Context in which each signal raises Interrupted."""

    def handler(signum: int, _: FrameType | None) -> None:
        raise Interrupted(signum)

    with _handlers(handler):
        yield


@contextmanager
def waking(wake: Callable[[int], None]) -> Iterator[None]:
    """Context in which each signal calls `wake` with its number.

    `wake` runs between any two instructions, so it only puts or writes.
    """
    with _handlers(lambda signum, _: wake(signum)):
        yield


@contextmanager
def ignored() -> Iterator[None]:
    """Context in which the signals do nothing."""
    with _handlers(lambda signum, _: None):
        yield


def ignore() -> None:
    """Ignore the signals to the end of the process: what there was to end has ended."""
    if threading.current_thread() is threading.main_thread():
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # as nohup leaves it
        del before[signal.SIGHUP]
    try:
        for signum in before:
            signal.signal(signum, handler)
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, signal.SIG_DFL if old is None else old)
