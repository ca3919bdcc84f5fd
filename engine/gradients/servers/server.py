"""A parameter server: it applies each push by itself, in the order of arrival, and answers with the newest weights.

    worker r ── gradients, presence, version read ──► inbox r ─┐ one at a time, under the lock:
    worker q ── ... ────────────────────────────────► inbox q ─┤ optimizer, version + 1
    own worker ── in memory ─────────────────────────────────┘
    worker r ◄── weights, version ── as soon as it may go on (`stale_synchronous`)

It lives beside one of the workers, with a thread for each of the others, and has a copy of its own of what it owns: of
a stage, or of a shard of it. So it serves while its worker computes, and computing is not disturbed by what it applies.

Where workers meet (for an evaluation, at the end) the push is acknowledged at once, and the weights follow when the
last of them is there. Whoever is held back hears now and then that it is: silence means a failure, as everywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.collectives.peers import Peers, wait_all
from engine.gradients.layout import Bucket
from engine.gradients.servers.stale_synchronous import StaleSynchronous
from engine.gradients.shard_parameters import Owned, ShardParameter
from engine.transport import Work

HELD, APPLIED, WEIGHTS = range(3)  # what an answer says: wait on; the push is applied; the weights follow
BEFORE_FLAGS = 2  # of a trailer: the version read, whether all meet; then the presence flags of all buckets
ANSWER = 4  # of an answer: what it says, the version to come, what the push was applied to, nanoseconds held back


class Push(NamedTuple):
    """What became of a push.

    The versions that it was computed from and applied to, and how long its worker was held back by the bound, in
    nanoseconds.
    """

    read: int
    applied: int
    held_ns: int

    @property
    def staleness(self) -> int:
        """Updates between the version that the push was computed from and the one that it was applied to."""
        return self.applied - self.read


@dataclass
class Inbox:
    """Buffers for a worker's pushes: its gradients of the owned part, a flat tensor per bucket, and the trailer."""

    parts: list[Tensor]
    trailer: Tensor
    gradients: list[Tensor] = field(default_factory=list)  # of the pieces


class Closed(Exception):  # noqa: N818  # not an error: the run is over, one way or another
    """The server's own worker has ended."""


class ParameterServer:
    """The server at position `own` of a group of `members`.

    `values`: the initial weights of what it owns, flat, one tensor per bucket; they are copied. `cut(number, weights)`:
    the pieces of bucket `number` in the copy. `update` is to be set before it serves: called for each push with the
    number of those before it, under the lock, when the gradients of `pieces` are set. `beat_s`: how often it says that
    a member is still held back.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        values: Sequence[Tensor],
        cut: Callable[[int, Tensor], list[Owned]],
        members: int,
        own: int,
        bound: int | None,
        beat_s: float,
    ) -> None:
        self.update: Callable[[int], None] = lambda version: None
        self._sent = [0] * members
        self._weights = [value.clone() for value in values]
        self._owned = [cut(number, weights) for number, weights in enumerate(self._weights)]
        self._flags = [sum(len(b.named) for b in buckets[:number]) for number in range(len(buckets))]
        self._count = sum(len(bucket.named) for bucket in buckets)
        self._own, self._beat_s = own, beat_s
        self.pace = StaleSynchronous(members, bound)
        self._changed = threading.Condition()
        self._open = 0  # pushes of steps below this are received
        self._error: BaseException | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def pieces(self) -> list[ShardParameter]:
        """Parameters that the optimizer updates, in the order of the parameters."""
        return sorted((own.piece for bucket in self._owned for own in bucket), key=lambda piece: piece.number)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent in replies since the server started."""
        return sum(self._sent)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that the server keeps."""
        return sum(weights.nbytes for weights in self._weights)

    def renew(self, values: Sequence[Tensor]) -> None:
        """Copy other initial weights into those of the server, before it serves."""
        for own, value in zip(self._weights, values, strict=True):
            own.copy_(value)

    def inbox(self, parts: Sequence[Tensor] | None = None) -> Inbox:
        """Return buffers for pushes: on `parts`, or on memory of their own."""
        made = [torch.empty_like(weights) for weights in self._weights] if parts is None else list(parts)
        box = Inbox(made, trailer_of(self._count))
        box.gradients = [own.gradient(part) for part, owns in zip(made, self._owned, strict=True) for own in owns]
        return box

    def serve(self, steps: int, connect: Callable[[], tuple[Peers, Peers]]) -> None:
        """Start a thread for each other member; `connect` gives it its ends: for pushes, and for answers."""
        for position in range(len(self.pace.clock)):
            if position != self._own:
                name = f"server for member {position}"
                arguments = (position, steps, *connect())
                self._threads.append(threading.Thread(target=self._serve, args=arguments, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def open(self, until: int) -> None:
        """Take pushes up to step `until`, exclusive; before that nobody waits for them, however long it lasts."""
        with self._changed:
            self._raise()
            self._open = until
            self._changed.notify_all()

    def apply(self, position: int, inbox: Inbox) -> int:
        """Apply what lies in an inbox; return the version that it was applied to."""
        read, flags = int(inbox.trailer[0]), inbox.trailer[BEFORE_FLAGS:].tolist()
        with self._changed:
            self._raise()
            while not self.pace.may_push(position):
                self._changed.wait()
                self._raise()
            gradients = iter(inbox.gradients)
            for first, owns in zip(self._flags, self._owned, strict=True):
                for own in owns:
                    gradient = next(gradients)
                    own.piece.parameter.grad = gradient if flags[first + own.place] else None
            applied = self.pace.version
            self.update(applied)
            self.pace.push(position, read)
            self._changed.notify_all()
        return applied

    def pull(self, position: int, meeting: bool, into: Sequence[Tensor], held: Callable[[], None]) -> tuple[int, int]:
        """Copy the weights once the member may go on; return their version and the nanoseconds it was held back for.

        `held` is called from time to time until then.
        """
        since: int | None = None
        while True:
            with self._changed:
                self._raise()
                if self.pace.may_read(position, meeting):
                    held_ns = 0 if since is None else time.monotonic_ns() - since
                    for target, weights in zip(into, self._weights, strict=True):
                        target.copy_(weights)
                    self._changed.notify_all()
                    return self.pace.read(position, meeting), held_ns
                since = since or time.monotonic_ns()
                changed = self._changed.wait(self._beat_s)
            if not changed:
                held()

    def paused(self) -> threading.Condition:
        """Context in which nothing is applied."""
        return self._changed

    def check(self) -> None:
        """Raise what a thread of the server has raised."""
        with self._changed:
            if self._error is not None:
                raise self._error

    def join(self) -> None:
        """Wait until every member has its last answer; raises what a thread has raised."""
        for thread in self._threads:
            thread.join()
        self.check()

    def close(self) -> None:
        """Let the threads end that wait for nothing from outside; from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise Closed

    # -- for one of the other members, in a thread -----------------------------------------------------------------

    def _serve(self, position: int, steps: int, pushes: Peers, answers: Peers) -> None:
        try:
            with torch.no_grad():
                self._answer_all(position, steps, pushes, answers)
        except Closed:
            pass
        except BaseException as error:  # noqa: BLE001  # raised again in the worker's own thread
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _answer_all(self, position: int, steps: int, pushes: Peers, answers: Peers) -> None:
        """Answer the pushes of a member.

        Answers lie in the inbox: a member that waits for one pushes nothing. They are waited for only when the last of
        a push is sent, because a member takes the answers of several servers one after the other.
        """
        inbox = self.inbox()
        sent: list[Work] = []

        def say(what: int, version: int = 0, applied: int = 0, held_ns: int = 0) -> None:
            answer = torch.tensor([what, version, applied, held_ns], dtype=torch.float64)
            sent.append(answers.send(position, answer))

        for step in range(steps):
            self._await_opening(step)
            arriving = [pushes.recv(position, part) for part in inbox.parts]
            wait_all([*arriving, pushes.recv(position, inbox.trailer)])
            applied, meeting = self.apply(position, inbox), bool(inbox.trailer[1])
            if meeting:
                say(APPLIED, applied=applied)
            version, held_ns = self.pull(position, meeting, inbox.parts, lambda: say(HELD))
            say(WEIGHTS, version, applied, held_ns)
            sent += [answers.send(position, part) for part in inbox.parts]
            wait_all(sent)
            sent.clear()
            self._sent[position] = answers.sent.nbytes

    def _await_opening(self, step: int) -> None:
        with self._changed:
            while step >= self._open:
                self._raise()
                self._changed.wait()


def trailer_of(parameters: int) -> Tensor:
    """Return the buffer for what follows the gradients of a push: float64, exact for every number in it."""
    return torch.zeros(BEFORE_FLAGS + parameters, dtype=torch.float64)
