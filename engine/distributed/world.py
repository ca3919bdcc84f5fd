"""The processes that train together, seen from one of them: found through the variables that torchrun sets.

Connections are made when they are first needed, in the order in which the program asks for them; all ranks run the
same program, so they meet. Gloo between CPUs (on loopback where all ranks are on one host), NCCL between GPUs.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from engine.collectives import Group, Ring
from engine.distributed.calls import Calls, NotedGroup
from engine.environment import check_launcher, joined, seat_of
from engine.transport import Endpoint, Transport, rendezvous
from engine.transport.threads import ThreadHub
from engine.transports import AUTO, choose_transport

TIMEOUT_S = 600.0
PATIENCE_S = 10.0


class World:
    """All ranks that train together, seen from this one.

    `store` is shared by them; after `patience_s` seconds of waiting a rank says for whom it waits. `between_cpus` makes
    the transport for gradients on CPUs where `transport` is one between GPUs, when it is needed.
    """

    def __init__(
        self,
        transport: Transport,
        store: Any,
        patience_s: float = PATIENCE_S,
        between_cpus: Callable[[], Transport] | None = None,
    ) -> None:
        self._between_cpus, self._cpus = between_cpus, None if transport.device.type == "cuda" else transport
        self.transport, self.store, self.patience_s = transport, store, patience_s
        self.rank, self.size = transport.rank, transport.world
        self._opened = 0
        self._labels: Counter[str] = Counter()
        self.calls = Calls(store, self.rank, self.size)
        transport.open(Group.edges(range(self.size), "state"))
        self.group = NotedGroup(transport, "state", self.calls)  # for what the program's own thread exchanges

    def ring(self, devices: Iterable[torch.device]) -> Ring:
        """Return a ring of its own channels over all ranks, for tensors on `devices`; all ranks ask in the same order.

        ValueError where they are of several kinds, or on GPUs where the world was joined with CPUs.
        """
        kinds = sorted({device.type for device in devices})
        if len(kinds) > 1:
            raise ValueError(f"the parameters are on {' and '.join(kinds)}: move the model to one device first")
        self._opened += 1
        label, transport = f"gradients{self._opened}", self._transport_of(*kinds)
        transport.open(Ring.edges(range(self.size), label))
        return Ring(transport, range(self.size), label)

    def _transport_of(self, kind: str) -> Transport:
        """Where a model is decides what its gradients go through, not which devices the host has."""
        if self.size == 1 or kind == self.transport.device.type:
            return self.transport
        if kind != "cpu" or self._between_cpus is None:
            raise ValueError(
                f"the parameters are on {kind}, but the ranks are connected for {self.transport.device.type}: call "
                f"engine.init(device={kind!r}) first, or move the model"
            )
        self._cpus = self._cpus or self._between_cpus()
        return self._cpus

    def next_label(self, kind: str) -> str:
        """A label that was not there before, for what all ranks open next: they ask in the same order."""
        self._labels[kind] += 1
        return f"{kind}{self._labels[kind]}"

    def making(self) -> AbstractContextManager[None]:
        """Context of the call in which ranks make their next optimizer together."""
        return self.calls.during("DistributedOptimizer", f"DistributedOptimizer(), number {self._opened + 1}")

    def close(self) -> None:
        """Close the connections to the other ranks."""
        for transport in {id(each): each for each in (self.transport, self._cpus) if each is not None}.values():
            transport.close()


_world: World | None = None
_own = threading.local()  # `join`: makes the world of a rank that is a thread
_place: rendezvous.Rendezvous | None = (
    None  # among what the launcher started: met once, whatever is opened and closed over it
)
_joinings = 0  # all ranks join equally often, and each time under keys of its own


def init(timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S, device: str = "auto") -> World:
    """Join the other ranks; needed only to change these values. `device`: "cpu", "cuda" or "auto".

    `timeout_s` limits every wait for another rank. ValueError where this process has joined already, where a time is
    no positive number, and for GPUs that are not there.
    """
    global _world  # noqa: PLW0603  # a process is one rank of one world
    if getattr(_own, "join", None) is not None:
        raise ValueError("within engine.run_threads() ranks have joined: give it timeout_s, without engine.init()")
    if _world is not None:
        raise ValueError("engine.init() comes first, before anything else of the engine is used, and once")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device}: there is auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no GPU here: use device=cpu or auto")
    for name, seconds in (("timeout_s", timeout_s), ("patience_s", patience_s)):
        if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ValueError(f"{name}={seconds!r} must be a positive, finite number of seconds")
    store = _store(timeout_s)
    beside = PrefixStore("cpus", store) if joined() else store
    transport = _transport(store, timeout_s, device)
    _world = World(transport, store, patience_s, lambda: _between(beside, timeout_s, torch.device("cpu")))
    atexit.register(shutdown)
    return _world


def shutdown() -> None:
    """Leave the other ranks; does nothing where this process has not joined."""
    global _world  # noqa: PLW0603
    if _world is not None:
        _world.close()
        _world = None


def current() -> World:
    """Return the world of this process, or of this thread where ranks are threads; joins at the first call."""
    join = getattr(_own, "join", None)
    return join() if join is not None else _world or init()


def bind(join: Callable[[], World] | None) -> None:
    """Let the calling thread be a rank of its own: `join()` gives its world. None ends that."""
    _own.join = join


def rank() -> int:
    """Return which of the ranks this process is, 0 .. size()-1."""
    return current().rank


def size() -> int:
    """Return how many ranks train together: 1 without a launcher."""
    return current().size


def _store(timeout_s: float) -> Any:
    global _place, _joinings  # noqa: PLW0603
    check_launcher()
    if not joined():
        return HashStore()
    if _place is None:
        _place = rendezvous.meet(timeout_s)
    _place.root.set_timeout(timedelta(seconds=timeout_s))
    _joinings += 1
    return PrefixStore(f"distributed{_joinings}", _place.store())


def _transport(store: Store, timeout_s: float, device: str) -> Transport:
    if not joined():
        return ThreadHub(1, timeout_s).transport(0)
    gpus = torch.cuda.device_count()
    seat = seat_of(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ, gpus)
    on_gpu = device == "cuda" or (device == "auto" and seat.enough(gpus))
    return _between(store, timeout_s, torch.device("cuda", seat.gpu(gpus)) if on_gpu else torch.device("cpu"))


def _between(store: Store, timeout_s: float, device: torch.device) -> Transport:
    """The transport of this process for tensors on such devices."""
    end = Endpoint(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), store, timeout_s, device)
    made: Transport = choose_transport(AUTO, "processes", device.type).open(end)
    return made
