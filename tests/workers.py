"""Runs a function on every rank of a small world: over the hub of threads, or over gloo.

gloo's groups are independent objects, so most of its tests need no second process: the ranks are threads that talk
over loopback. `processes` is for what only a process can do: be stopped or killed.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from engine.collectives import Collective
from engine.transport import Edge, Transport
from engine.transport.gloo import GlooTransport
from engine.transport.shared import SharedMemoryTransport
from engine.transport.threads import ThreadHub, queues

T = TypeVar("T")
HANG_S = 60.0
Run = Callable[..., list[Any]]


def over_threads(world: int, main: Callable[[Transport], T], timeout_s: float = 20.0) -> list[T]:
    """`main(transport)` on every rank; results in rank order. The first exception is raised here."""
    hub = ThreadHub(world, timeout_s)
    return over(world, main, hub.transport)


def over_gloo(world: int, main: Callable[[Transport], T], timeout_s: float = 20.0) -> list[T]:
    """The same over gloo on loopback; every transport is closed at the end."""
    store = dist.HashStore()
    return over(world, main, lambda rank: GlooTransport(rank, world, store, timeout_s))


def over_shared(world: int, main: Callable[[Transport], T], timeout_s: float = 20.0) -> list[T]:
    """The same through shared memory; every transport is closed at the end."""
    store = dist.HashStore()
    return over(world, main, lambda rank: SharedMemoryTransport(rank, world, store, timeout_s))


RUNS: dict[str, Run] = {"threads": over_threads, "gloo": over_gloo, "shared": over_shared}


def copy_late(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Threads' messages are copied some time after both ends have met, as by a socket: memory must stay until then."""
    at_once, delays = queues._complete, random.Random(seed)

    def later(send: queues.Operation, receive: queues.Operation, edge: Edge) -> None:
        condition = send._queues.condition

        def copy() -> None:
            with condition:
                at_once(send, receive, edge)
                condition.notify_all()

        threading.Timer(delays.random() * 0.004, copy).start()

    patch.setattr(queues, "_complete", later)


def over(world: int, main: Callable[[Transport], T], transport: Callable[[int], Transport]) -> list[T]:
    transports = [transport(rank) for rank in range(world)]
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = main(transports[rank])
        except BaseException as error:
            errors.append(error)
            transports[rank].abort()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), "a rank hangs"
    for each in transports:
        each.close()
    if errors:
        raise errors[0]
    return results


def _child(main: Callable[..., None], rank: int, world: int, port: int, timeout_s: float, pipe: Any) -> None:
    pipe.send("imported")  # importing takes longer than a short time limit allows
    pipe.recv()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
    main(GlooTransport(rank, world, store, timeout_s), pipe)


@contextmanager
def processes(world: int, main: Callable[[Transport, Any], None], timeout_s: float) -> Iterator[list[tuple[Any, Any]]]:
    """(process, pipe) per rank, each running `main(transport, pipe)`; killed on leaving."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    started = []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_child, args=(main, rank, world, store.port, timeout_s, theirs))
            process.start()
            theirs.close()
            started.append((process, ours))
        for _, pipe in started:
            assert pipe.poll(HANG_S) and pipe.recv() == "imported"
        for _, pipe in started:
            pipe.send("connect")
        yield started
    finally:
        for process, pipe in started:
            process.kill()
            process.join()
            pipe.close()
        del store


def pair(transport: Transport) -> tuple[Any, Any]:
    """(channel to the other rank, channel from it) in a world of two."""
    edges = [Edge(0, 1, "F"), Edge(1, 0, "B")]
    transport.open(edges)
    there, back = (transport.channel(edge) for edge in edges)
    return (there, back) if transport.rank == 0 else (back, there)


def joined(transport: Transport, kind: type[Collective]) -> Collective:
    members = list(range(transport.world))
    transport.open(kind.edges(members, "x"))
    if kind.backend_group and transport.world > 1:
        transport.open_group(members, "x", backend=True)
    return kind(transport, members, "x")
