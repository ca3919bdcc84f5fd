"""The executor: walks a lowered row and does what it says. There is one loop, for every schedule and every transport.

    RECV_F ──post──┐                          ┌──► SEND_F    posted, not waited for
                   ▼ wait                     │
                   F ─────── output ──────────┤
                                              └──► loss (last stage)
    RECV_B ──post──┐
                   ▼ wait
                   B, I ──── input gradients ─────► SEND_B
                   W: the weight gradients that I has left
    REDUCE: start the replicas' reduction of a stage, in the background          STEP: wait for it, clip, update

Neighbouring stages on one rank hand tensors over directly. An exception leaves with the attributes `stage`,
`microbatch` and `action`, so that whoever reports it can say where it happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.job import MessageSpec
from engine.plan.actions import Action, Op, Placement, Program
from engine.plan.timeline import Kind
from engine.runtime.boundary import Layout, Message, tensors_of
from engine.runtime.links import ONE_WAY, Links, Pending
from engine.runtime.position import here
from engine.runtime.stage import Draw, Stage
from engine.runtime.trace import Tracer


class Row(NamedTuple):
    """A rank's row of a program as the executor takes it."""

    actions: Sequence[tuple[int, Action]]  # packed and unpacked
    halves: frozenset[tuple[int, int]]  # (stage, micro-batch) whose backward is I and W


def row_of(program: Program, rank: int) -> Row:
    actions = list(zip(program.rows[rank].tolist(), program.actions(rank), strict=True))
    return Row(actions, frozenset((a.stage, a.microbatch) for _, a in actions if a.op is Op.I))


@dataclass
class Feed:
    """What the ends of a pipeline need for one pass of micro-batches; `sizes[m]` samples in micro-batch m."""

    sizes: Sequence[int]
    input: Callable[[int], Any]  # on the first stage's rank
    target: Callable[[int], Any]  # on the last stage's rank
    draw: Callable[[int], Draw]
    loss: Callable[[Any, Any], Tensor]  # sum over a micro-batch
    count: Callable[[], float]  # what the global batch counted; may wait for the other replicas
    evaluated: Callable[[Any, Any, int], None] | None = None  # output, target, micro-batch: given in evaluation only
    losses: dict[int, Tensor] = field(default_factory=dict)  # filled: micro-batch -> loss sum

    @property
    def training(self) -> bool:
        return self.evaluated is None


class Executor:
    """Runs rows of one rank. `specs(mode, rows)` gives the messages between stages for micro-batches of `rows`."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        stages: Mapping[int, Stage],
        links: Links,
        tracer: Tracer,
        specs: Callable[[str, int], Sequence[MessageSpec]],
        reduce: Callable[[int], None],
        step: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.placement = placement
        self.stages = stages
        self.links = links
        self.tracer = tracer
        self.peak_in_flight = 0
        self.peak_bytes = 0
        self.when_idle: Callable[[], None] | None = None  # done once, when the rank next waits for a message
        self._specs = specs
        self._messages: dict[tuple[str, int, int], Message] = {}
        self._feed: Feed
        self._halves: frozenset[tuple[int, int]]
        self._posted: dict[tuple[Op, int, int], Pending] = {}
        self._handed: dict[tuple[Op, int, int], list[Tensor | None]] = {}
        self._outbox: dict[tuple[Op, int, int], list[Tensor | None]] = {}
        self._do: dict[Op, Callable[[int, int], None]] = {
            Op.F: self._forward,
            Op.B: lambda stage, microbatch: self._backward(Kind.B, stage, microbatch),
            Op.I: lambda stage, microbatch: self._backward(Kind.I, stage, microbatch),
            Op.W: self._weights,
            Op.SEND_F: self._send_f,
            Op.RECV_F: self._recv_f,
            Op.SEND_B: self._send_b,
            Op.RECV_B: self._recv_b,
            Op.REDUCE: lambda stage, _: reduce(stage),
            Op.STEP: lambda _, __: step(),
        }

    def run(self, row: Row, feed: Feed) -> None:
        """Execute one row. In evaluation (no graph is kept) the row holds forwards only."""
        self._feed, self._halves = feed, row.halves
        position = here()
        with torch.set_grad_enabled(feed.training):
            for code, action in row.actions:
                position[0] = code
                try:
                    self._do[action.op](action.stage, action.microbatch)
                except BaseException as error:
                    _locate(error, action)
                    raise
        assert not self._posted and not self._outbox and not self._handed, "a row left messages behind"

    # -- compute ---------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> None:
        feed, rows = self._feed, self._feed.sizes[microbatch]
        message = self._message(stage - 1, microbatch) if stage > 0 else None
        received = self._arrived(Op.RECV_F, stage, microbatch) if message else None
        given = None if message else feed.input(microbatch)
        last = stage == self.placement.stages - 1
        target = feed.target(microbatch) if last else None
        start = self.tracer.mark()
        if feed.training:
            loss = (lambda output: feed.loss(output, target)) if last else None
            halves = (stage, microbatch) in self._halves
            output, total = self.stages[stage].forward(
                microbatch, received, given, message, feed.draw(microbatch), loss, rows, halves
            )
            if total is not None:
                feed.losses[microbatch] = total
        else:
            if message:
                assert received is not None
                given, _ = message.enter(received, torch.empty(0))
            output = self.stages[stage].run(given, None)
            if last:
                assert feed.evaluated is not None
                feed.evaluated(output, target, microbatch)
        self.tracer.add(Kind.F, stage, microbatch, start, self.tracer.mark())
        self._count_live()
        if not last:
            self._hand_on(output, stage, microbatch)

    def _backward(self, kind: Kind, stage: int, microbatch: int) -> None:
        """B, or its first half, I: what it hands on is the same."""
        feed = self._feed
        last = stage == self.placement.stages - 1
        gradients = None if last else self._arrived(Op.RECV_B, stage, microbatch)
        count = feed.count() if last else None
        start = self.tracer.mark()
        run = self.stages[stage].backward if kind is Kind.B else self.stages[stage].backward_input
        box = run(microbatch, gradients, count)
        self.tracer.add(kind, stage, microbatch, start, self.tracer.mark())
        if kind is Kind.I:
            self._count_live()
        if stage > 0:
            self._deliver(Op.SEND_B, stage, stage - 1, microbatch, box)

    def _weights(self, stage: int, microbatch: int) -> None:
        start = self.tracer.mark()
        self.stages[stage].backward_weight(microbatch)
        self.tracer.add(Kind.W, stage, microbatch, start, self.tracer.mark())

    def _count_live(self) -> None:
        if self._feed.training:
            self.peak_in_flight = max(self.peak_in_flight, sum(s.in_flight for s in self.stages.values()))
            self.peak_bytes = max(self.peak_bytes, sum(s.live_bytes for s in self.stages.values()))

    # -- messages --------------------------------------------------------------------------------------------------

    def _hand_on(self, output: Any, stage: int, microbatch: int) -> None:
        """Check a stage's output against what the next stage expects, and pass it on."""
        difference = self._message(stage, microbatch).mismatch(output)
        if difference:
            raise ValueError(
                f"stage {stage} was found to send something else at start-up: {difference}. Shapes that vary between "
                "steps are not supported: pad the samples to one shape"
            )
        tensors: list[Tensor | None] = [t.detach() for t in tensors_of(output)]
        self._deliver(Op.SEND_F, stage, stage + 1, microbatch, tensors)

    def _deliver(self, op: Op, stage: int, neighbour: int, microbatch: int, tensors: list[Tensor | None]) -> None:
        if self.placement.rank(neighbour, microbatch) != self.rank:
            self._outbox[op, stage, microbatch] = tensors
            return
        # On one rank the next stage gets copies: it may work in place on what this one saved for its backward.
        arrival = Op.RECV_F if op is Op.SEND_F else Op.RECV_B
        self._handed[arrival, neighbour, microbatch] = [None if t is None else t.clone() for t in tensors]

    def _arrived(self, op: Op, stage: int, microbatch: int) -> list[Tensor | None]:
        """The tensors that a compute action needs; waits for them."""
        key = (op, stage, microbatch)
        if key in self._handed:
            return self._handed.pop(key)
        start = self.tracer.mark()
        if self.when_idle is not None:
            work, self.when_idle = self.when_idle, None
            work()
        tensors = self.links.receive(self._posted.pop(key), stage - 1 if op is Op.RECV_F else stage + 1, microbatch)
        kind = Kind.WAIT_F if op is Op.RECV_F else Kind.WAIT_B
        self.tracer.add(kind, stage, microbatch, start, self.tracer.mark())
        return tensors

    def _send_f(self, stage: int, microbatch: int) -> None:
        self._send(Op.SEND_F, stage, stage + 1, microbatch, self._message(stage, microbatch).forward)
        if not self._feed.training:
            self.links.limit(ONE_WAY)

    def _send_b(self, stage: int, microbatch: int) -> None:
        self._send(Op.SEND_B, stage, stage - 1, microbatch, self._message(stage - 1, microbatch).backward)

    def _send(self, op: Op, stage: int, neighbour: int, microbatch: int, layout: Layout) -> None:
        start = self.tracer.mark()
        peer = self.placement.rank(neighbour, microbatch)
        kind = "F" if op is Op.SEND_F else "B"
        self.links.send(peer, kind, layout, self._outbox.pop((op, stage, microbatch)), stage, microbatch)
        self.tracer.add(Kind(int(op)), stage, microbatch, start, self.tracer.mark())

    def _recv_f(self, stage: int, microbatch: int) -> None:
        self._post(Op.RECV_F, stage, stage - 1, microbatch, self._message(stage - 1, microbatch).forward)

    def _recv_b(self, stage: int, microbatch: int) -> None:
        self._post(Op.RECV_B, stage, stage + 1, microbatch, self._message(stage, microbatch).backward)

    def _post(self, op: Op, stage: int, neighbour: int, microbatch: int, layout: Layout) -> None:
        start = self.tracer.mark()
        peer = self.placement.rank(neighbour, microbatch)
        self._posted[op, stage, microbatch] = self.links.post(peer, "F" if op is Op.RECV_F else "B", layout)
        self.tracer.add(Kind(int(op)), stage, microbatch, start, self.tracer.mark())

    def _message(self, producer: int, microbatch: int) -> Message:
        """What stage `producer` hands on for a micro-batch."""
        key = ("train" if self._feed.training else "eval", self._feed.sizes[microbatch], producer)
        if key not in self._messages:
            self._messages[key] = Message(self._specs(key[0], key[1])[producer])
        return self._messages[key]


def _locate(error: BaseException, action: Action) -> None:
    """Say on the exception where it happened; the innermost place stays."""
    if not hasattr(error, "action"):
        error.stage, error.microbatch, error.action = action.stage, action.microbatch, str(action)  # type: ignore[attr-defined]
