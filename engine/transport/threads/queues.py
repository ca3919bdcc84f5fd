"""A channel between threads: two ordered queues, of sends that wait for a receive and of receives that wait for a send.

Only one of the two is ever non-empty. Whoever comes second copies the payload, so a receive buffer never aliases what
was sent, and both operations end at that moment:

    rank 0   isend(x) ──► [x]          queued: holds a reference, does not block
    rank 1                [x] ──► irecv(b)          b.copy_(x), both are done

This is law 3's rule to the letter: a send is posted when reached, and completes once its receive is posted. On a GPU
the copy is queued behind what both threads' streams had queued when they posted, and `wait` queues behind the copy.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from engine.transport import Edge, Work
from engine.transport.threads.timeouts import Timeouts


class Operation:
    """A send or a receive under way."""

    __slots__ = ("_peer", "_queues", "complete", "error", "kind", "mark", "tensor")

    def __init__(self, kind: str, tensor: Tensor, queues: Queues, peer: int) -> None:
        self.kind = kind
        self.tensor: Tensor | None = tensor
        self.complete = False
        self.error: str | None = None
        self.mark = mark(tensor)
        self._queues = queues
        self._peer = peer

    def done(self) -> bool:
        """Say, without waiting, whether the operation is known to be complete."""
        return self.complete

    def wait(self) -> None:
        """Block until the other side has posted its half; on a GPU also queue behind the copy."""
        if not self.complete:
            queues = self._queues
            what = f"{self.kind} on {queues.edge}, peer {self._peer}"
            with queues.condition:
                queues.timeouts.wait(queues.condition, lambda: self.complete, what, self._peer)
        if self.error:
            raise RuntimeError(self.error)
        after(self.mark)


class Queues:
    """Both ends of one edge."""

    def __init__(self, edge: Edge, timeouts: Timeouts) -> None:
        self.edge = edge
        self.timeouts = timeouts
        self.condition = timeouts.condition()
        self._waiting: dict[str, deque[Operation]] = {"send": deque(), "receive": deque()}

    @property
    def length(self) -> int:
        """Number of operations that wait for their other half."""
        return sum(map(len, self._waiting.values()))

    def post(self, kind: str, tensor: Tensor) -> Work:
        """Queue a send or a receive, or complete it together with the oldest of the other kind."""
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} on {self.edge}: a channel carries contiguous tensors")
        sending = kind == "send"
        operation = Operation(kind, tensor.detach(), self, self.edge.dst if sending else self.edge.src)
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


def _complete(send: Operation, receive: Operation, edge: Edge) -> None:
    source, target = send.tensor, receive.tensor
    assert source is not None and target is not None
    if (source.numel(), source.dtype) != (target.numel(), target.dtype):
        send.error = receive.error = (
            f"{edge}: rank {edge.src} sends {source.numel()} x {source.dtype}, "
            f"rank {edge.dst} receives {target.numel()} x {target.dtype}"
        )
    else:
        after(send.mark, receive.mark)
        target.view(-1).copy_(source.view(-1))
        send.mark = receive.mark = mark(target)
    for operation in (send, receive):
        operation.tensor = None
        operation.complete = True


def mark(tensor: Tensor) -> torch.cuda.Event | None:
    """Record what the calling thread's stream has queued so far; None for a tensor on the CPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def after(*marks: torch.cuda.Event | None) -> None:
    """Queue what follows in the calling thread's stream behind `marks`."""
    for mark in marks:
        if mark is not None:
            torch.cuda.current_stream(mark.device).wait_event(mark)
