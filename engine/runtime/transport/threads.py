"""All ranks are threads of one process: a hub of ordered queues, one per channel.

A channel keeps the sends that wait for a receive and the receives that wait for a send; only one of the two queues is
ever non-empty. Whoever comes second copies the payload, so a receive buffer never aliases what was sent, and both
operations end at that moment:

    rank 0   isend(x) ──► [x]          queued: holds a reference, does not block
    rank 1                [x] ──► irecv(b)          b.copy_(x), both are done

This is law 3's rule to the letter: a send is posted when reached, and completes once its receive is posted. On a GPU
the copy is queued behind what both threads' streams had queued when they posted, and `wait` queues behind the copy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.runtime.transport import Channel, Edge, PeerLost, PeerTimeout, Work


class ThreadHub:
    """What the threads of one run share. `timeout_s` limits every wait."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.aborted = False
        self._lock = threading.Lock()
        self._conditions: list[threading.Condition] = []
        self._edges: list[Edge] | None = None
        self._queues: dict[Edge, _Queues] = {}
        self._groups: dict[tuple[tuple[int, ...], str], _Group] = {}

    def transport(self, rank: int) -> ThreadTransport:
        """The end of `rank`, for its thread."""
        return ThreadTransport(self, rank)

    def abort(self) -> None:
        """Every wait of every rank, present and future, raises PeerLost. From any thread."""
        self.aborted = True
        with self._lock:
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def open(self, rank: int, edges: Sequence[Edge]) -> None:
        """Raises ValueError where `rank` passes another list than the ranks before it."""
        with self._lock:
            if self._edges is None:
                self._edges = list(edges)
            for mine, theirs in zip(edges, self._edges, strict=False):
                if mine != theirs:
                    raise ValueError(f"rank {rank} opens {mine} where another rank opens {theirs}")
            if len(edges) != len(self._edges):
                raise ValueError(f"rank {rank} opens {len(edges)} channels, another rank {len(self._edges)}")
            for edge in edges:
                if edge not in self._queues:
                    self._queues[edge] = _Queues(edge, self, self._condition())

    @property
    def unmatched(self) -> int:
        """Sends without a receive and receives without a send; 0 between two steps."""
        return sum(queues.length for queues in self._queues.values())

    def queues(self, edge: Edge) -> _Queues:
        return self._queues[edge]

    def group(self, members: tuple[int, ...], label: str) -> _Group:
        with self._lock:
            if (members, label) not in self._groups:
                self._groups[members, label] = _Group(members, label, self, self._condition())
            return self._groups[members, label]

    def wait(self, condition: threading.Condition, done: Callable[[], bool], what: str, peer: int | None) -> None:
        """Wait on a held condition until `done()`."""
        deadline = time.monotonic() + self.timeout_s
        while not done():
            if self.aborted:
                raise PeerLost(f"{what}: the run was aborted", peer)
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerTimeout(f"{what}: nothing for {self.timeout_s:g} s", peer)
            condition.wait(left)

    def _condition(self) -> threading.Condition:
        condition = threading.Condition(threading.Lock())
        self._conditions.append(condition)
        return condition


class _Operation:
    """A send or a receive: a Work."""

    __slots__ = ("_peer", "_queues", "done", "error", "kind", "mark", "tensor")

    def __init__(self, kind: str, tensor: Tensor, queues: _Queues, peer: int) -> None:
        self.kind = kind
        self.tensor: Tensor | None = tensor
        self.done = False
        self.error: str | None = None
        self.mark = _mark(tensor)
        self._queues = queues
        self._peer = peer

    def wait(self) -> None:
        if not self.done:
            queues = self._queues
            with queues.condition:
                queues.hub.wait(
                    queues.condition, lambda: self.done, f"{self.kind} on {queues.edge}, peer {self._peer}", self._peer
                )
        if self.error:
            raise RuntimeError(self.error)
        _after(self.mark)


class _Queues:
    """Both ends of one edge."""

    def __init__(self, edge: Edge, hub: ThreadHub, condition: threading.Condition) -> None:
        self.edge = edge
        self.hub = hub
        self.condition = condition
        self._waiting: dict[str, deque[_Operation]] = {"send": deque(), "receive": deque()}

    @property
    def length(self) -> int:
        return sum(map(len, self._waiting.values()))

    def post(self, kind: str, tensor: Tensor) -> Work:
        """Queue a send or a receive, or complete it together with the oldest of the other kind."""
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} on {self.edge}: a channel carries contiguous tensors")
        sending = kind == "send"
        operation = _Operation(kind, tensor.detach(), self, self.edge.dst if sending else self.edge.src)
        with self.condition:
            others = self._waiting["receive" if sending else "send"]
            if not others:
                self._waiting[kind].append(operation)
                return operation
            other = others.popleft()
            _complete(*((operation, other) if sending else (other, operation)), self.edge)
            self.condition.notify_all()
        if operation.error:
            raise RuntimeError(operation.error)
        return operation


def _complete(send: _Operation, receive: _Operation, edge: Edge) -> None:
    source, target = send.tensor, receive.tensor
    assert source is not None and target is not None
    if (source.numel(), source.dtype) != (target.numel(), target.dtype):
        send.error = receive.error = (
            f"{edge}: rank {edge.src} sends {source.numel()} x {source.dtype}, "
            f"rank {edge.dst} receives {target.numel()} x {target.dtype}"
        )
    else:
        _after(send.mark, receive.mark)
        target.view(-1).copy_(source.view(-1))
        send.mark = receive.mark = _mark(target)
    for operation in (send, receive):
        operation.tensor = None
        operation.done = True


def _mark(tensor: Tensor) -> torch.cuda.Event | None:
    """What the calling thread's stream has queued so far; None for a tensor on the CPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _after(*marks: torch.cuda.Event | None) -> None:
    """Queue what follows in the calling thread's stream behind `marks`."""
    for mark in marks:
        if mark is not None:
            torch.cuda.current_stream(mark.device).wait_event(mark)


class _Group:
    """Sums over some ranks. The k-th call of each member belongs to round k."""

    def __init__(self, members: tuple[int, ...], label: str, hub: ThreadHub, condition: threading.Condition) -> None:
        self.members = members
        self.name = f"all-reduce {label} over ranks {list(members)}"
        self.hub = hub
        self.condition = condition
        self._calls = dict.fromkeys(members, 0)
        self._rounds: dict[int, _Round] = {}

    def join(self, rank: int, tensor: Tensor) -> Work:
        """Contribute a copy of `tensor`; the returned work brings the sum back into it."""
        with self.condition:
            number = self._calls[rank]
            self._calls[rank] += 1
            current = self._rounds.setdefault(number, _Round())
            current.parts[rank] = tensor.detach().clone()
            current.marks[rank] = _mark(tensor)
            if len(current.parts) == len(self.members):
                del self._rounds[number]
                current.finish(self.members, self.name)
                self.condition.notify_all()
        return _Sum(self, current, tensor)


class _Round:
    def __init__(self) -> None:
        self.parts: dict[int, Tensor] = {}  # kept until every member has its sum: other streams read them
        self.marks: dict[int, torch.cuda.Event | None] = {}
        self.mark: torch.cuda.Event | None = None
        self.total: Tensor | None = None
        self.error: str | None = None

    def finish(self, members: Sequence[int], name: str) -> None:
        """Add once, in rank order, for everybody."""
        shapes = {rank: (tuple(self.parts[rank].shape), self.parts[rank].dtype) for rank in members}
        if len(set(shapes.values())) > 1:
            self.error = f"{name}: the members pass different tensors: {shapes}"
            return
        _after(*self.marks.values())
        total = self.parts[members[0]]
        for rank in members[1:]:
            total.add_(self.parts[rank])
        self.mark = _mark(total)
        self.total = total


class _Sum:
    """A Work."""

    def __init__(self, group: _Group, current: _Round, tensor: Tensor) -> None:
        self._group, self._round, self._tensor = group, current, tensor
        self._copied = False

    def wait(self) -> None:
        group, current = self._group, self._round
        with group.condition:
            group.hub.wait(group.condition, lambda: bool(current.error) or current.total is not None, group.name, None)
        if current.error:
            raise RuntimeError(current.error)
        if not self._copied:
            assert current.total is not None
            _after(current.mark)
            self._tensor.detach().copy_(current.total)
            self._copied = True


class _ThreadChannel:
    """One end of an edge."""

    def __init__(self, edge: Edge, queues: _Queues) -> None:
        self.edge = edge
        self.bytes_sent = 0
        self._queues = queues

    def isend(self, tensor: Tensor) -> Work:
        work = self._queues.post("send", tensor)
        self.bytes_sent += tensor.nbytes
        return work

    def irecv(self, tensor: Tensor) -> Work:
        return self._queues.post("receive", tensor)


class ThreadTransport:
    """One rank's ends. Built by `ThreadHub.transport`."""

    device = torch.device("cpu")

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.rank = rank
        self.world = hub.world
        self.hub = hub
        self._channels: dict[Edge, _ThreadChannel] = {}

    def open(self, edges: Sequence[Edge]) -> None:
        self.hub.open(self.rank, edges)
        for edge in edges:
            if self.rank in (edge.src, edge.dst):
                self._channels[edge] = _ThreadChannel(edge, self.hub.queues(edge))

    def channel(self, edge: Edge) -> Channel:
        return self._channels[edge]

    def open_group(self, members: Sequence[int], label: str) -> None:
        self.hub.group(tuple(members), label)

    def all_reduce(self, tensor: Tensor, members: Sequence[int], label: str) -> Work:
        return self.hub.group(tuple(members), label).join(self.rank, tensor)

    def close(self) -> None:
        self._channels.clear()

    def abort(self) -> None:
        """One rank's end is the end of the run: every rank's waits raise PeerLost."""
        self.hub.abort()
