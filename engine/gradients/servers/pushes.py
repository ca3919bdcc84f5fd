"""A worker's side of asynchronous SGD: it pushes its own gradients to the servers and takes their weights back.

    seen(i)             a full bucket is pushed to whoever owns a part of it      ┐ reduce thread
    REDUCE   launch()   whatever was not; then versions and presence              ┘
    STEP     wait()     the answers: the newest weights; gradients are forgotten
    meet()              where all workers meet: the weights behind the last push of the last of them

Nothing is combined: a worker waits for its servers, never for another worker, but for the bound that the servers keep
and where all meet. Who owns what is `division`'s: one server per stage, or a shard on every worker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.collectives.peers import Peers, mesh, wait_all
from engine.collectives.primitives.group import Group
from engine.gradients.background import ReduceThread
from engine.gradients.buckets import Reducer
from engine.gradients.division import Division
from engine.gradients.layout import Bucket, Named
from engine.gradients.order import Order
from engine.gradients.servers.server import ANSWER, APPLIED, BEFORE_FLAGS, HELD, ParameterServer, Push, trailer_of
from engine.gradients.shard_parameters import Owned, move_into, owned
from engine.transport import Edge, Work


class PushReducer(Reducer):
    """A reducer that pushes this worker's gradients to the servers and takes their weights back.

    Used as `Reducer`; `server` is this worker's own, if it has one. `group`: the workers; `kind`: who owns what.
    `bound` as in `StaleSynchronous`; `beat_s` as in `ParameterServer`. The parameters are moved into buffers of the
    reducer's. `edges` must have been opened.
    """

    def __init__(
        self,
        params: Sequence[Named],
        group: Group,
        bucket_bytes: int,
        thread: ReduceThread,
        order: Order,
        kind: type[Division],
        bound: int | None,
        beat_s: float,
    ) -> None:
        division = kind(group)
        super().__init__(params, group.collective, bucket_bytes, thread, order, _Pushing(self, division.shards))
        self.meeting = False  # whether all meet behind the step that comes next
        self._group = group
        self._own = group.position
        self._owners = list(kind.owners(group.size)) if self.buckets else []
        self._spans = {owner: [division.span(bucket, owner) for bucket in self.buckets] for owner in self._owners}
        self._values = [torch.zeros_like(flat) for flat in self._flats]
        for bucket, values in zip(self.buckets, self._values, strict=True):
            move_into(bucket, values)
        self._pushes, self._answers = self._connect()
        self._trailers = {owner: trailer_of(len(self.named)) for owner in self._owners}
        self._answer = torch.empty(ANSWER, dtype=torch.float64)
        self._read = dict.fromkeys(self._owners, 0)  # the version of the weights from each owner
        self._sent: list[Work] = []
        self._done: dict[int, Push] = {}
        self.server: ParameterServer | None = None
        if self._own in self._owners:
            numbers = {id(p): number for number, (_, p) in enumerate(self.named)}

            def cut(number: int, weights: Tensor) -> list[Owned]:
                span = self._spans[self._own][number]
                return owned(self.buckets[number], span, weights, numbers, division.elementwise)

            parts = self._parts(self._own, self._values)
            self.server = ParameterServer(self.buckets, parts, cut, group.size, self._own, bound, beat_s)
            self._inbox = self.server.inbox(self._parts(self._own, self._flats))
            self._inbox.trailer = self._trailers[self._own]

    @staticmethod
    def edges(members: Sequence[int], label: str, kind: type[Division]) -> list[Edge]:
        """Return the channels that `Transport.open` must be given, on all ranks, besides the group's own."""
        pairs = [(a, b) for a in range(len(members)) for b in kind.owners(len(members)) if a != b]
        back = [(b, a) for a, b in pairs]
        return [*mesh(members, pairs, f"{label}push"), *mesh(members, back, f"{label}pull")]

    def renew_server(self) -> None:
        """Give this worker's server, if it has one, the parameters as they are now; call before it serves."""
        if self.server is not None:
            self.server.renew(self._parts(self._own, self._values))

    def serve(self, steps: int) -> None:
        """Let this worker's server take `steps` pushes of each worker."""
        if self.server is not None:
            self.server.serve(steps, self._connect)

    def wait(self, patience_s: float | None = None) -> None:
        """Block until the push is applied and the weights are there; where all are `meeting`, until it is applied."""
        super().wait(patience_s)
        for owner in self._owners:
            self._take_answer(owner, self.meeting)
        wait_all(self._sent)
        self._sent.clear()
        if self.spans:  # the last one's ends with the answers
            self.spans[-1] = self.spans[-1]._replace(end=time.monotonic_ns())
        for _, parameter in self.named:
            parameter.grad = None
        self.bytes_sent = self._pushes.sent.nbytes + (self.server.bytes_sent if self.server else 0)

    def meet(self) -> None:
        """Block until all workers are there and their weights are the same."""
        for owner in self._owners:
            self._take_answer(owner, False)

    def pop_records(self) -> list[tuple[int, int, int, int]]:
        """Return what became of the last step's push: the position of each owner, and its `Push`."""
        return [(owner, *push) for owner, push in self._done.items()]

    def push(self, number: int) -> None:
        """Push bucket `number`, which is packed, and behind the last what servers must know; in the reduce thread."""
        others = [owner for owner in self._owners if owner != self._own]
        for owner in others:
            part = self._flats[number][slice(*self._spans[owner][number])]
            self._sent.append(self._pushes.send(owner, part))
        if number < len(self.buckets) - 1:
            return
        heads = [flat[: len(bucket.named)].double() for bucket, flat in zip(self.buckets, self._flats, strict=True)]
        for owner, trailer in self._trailers.items():
            trailer[0], trailer[1] = self._read[owner], self.meeting
            trailer[BEFORE_FLAGS:] = torch.cat(heads)
        for owner in others:
            self._sent.append(self._pushes.send(owner, self._trailers[owner]))
        if self.server is not None:
            applied = self.server.apply(self._own, self._inbox)
            self._done[self._own] = Push(self._read[self._own], applied, 0)

    def _hand_back(self, number: int) -> None:
        """The gradients stay the worker's own, until the step ends."""

    def _take_answer(self, owner: int, applied_is_enough: bool) -> None:
        parts = self._parts(owner, self._values)
        if owner == self._own:
            assert self.server is not None
            if not applied_is_enough:
                self._read[owner], held_ns = self.server.pull(owner, self.meeting, parts, lambda: None)
                self._done[owner] = self._done[owner]._replace(held_ns=0 if self.meeting else held_ns)
            return
        what, version, applied, held_ns = self._next_answer(owner)
        self._done[owner] = Push(self._read[owner], applied, held_ns)
        if what == APPLIED:
            assert applied_is_enough
            return
        wait_all([self._answers.recv(owner, part) for part in parts])
        self._read[owner] = version

    def _next_answer(self, owner: int) -> list[int]:
        while True:
            self._answers.recv(owner, self._answer).wait()
            answer = [int(value) for value in self._answer.tolist()]
            if answer[0] != HELD:
                return answer
            if self.server is not None:
                self.server.check()  # what this worker is held back for may be a member that its own server has lost

    def _parts(self, owner: int, flats: Sequence[Tensor]) -> list[Tensor]:
        return [flat[slice(*span)] for flat, span in zip(flats, self._spans[owner], strict=True)]

    def _connect(self) -> tuple[Peers, Peers]:
        """Ends of one thread's own: for pushes, and for answers."""
        label, members, transport = self._group.label, self._group.members, self._group.collective.transport
        return Peers(transport, members, f"{label}push"), Peers(transport, members, f"{label}pull")


class _Pushing:
    """What `Reducer` does with a bucket."""

    marks = 0

    def __init__(self, reducer: PushReducer, shards: int) -> None:
        self._reducer, self.shards = reducer, shards

    def __call__(self, number: int, bucket: Bucket, flat: Tensor) -> None:
        self._reducer.push(number)
