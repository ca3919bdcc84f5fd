"""The executor: walks a lowered row and does what it says. There is one loop, for every schedule and every transport.

    RECV_F ──post──┐                          ┌──► SEND_F    posted, not waited for
                   ▼ wait                     │
                   F ─────── output ──────────┤
                                              └──► loss (last stage)
    RECV_B ──post──┐
                   ▼ wait
                   B, I ──── input gradients ─────► SEND_B
                   W: the weight gradients that I has left
    REDUCE: what is left of a stage's reduction starts, in the background        STEP: wait for it, clip, update
    GATHER: updated parameters are exchanged, in the background; the stage's next forward waits for them

Before the last B or W of a stage `StageUpdates.closing` is called: from then on gradients that are complete may be
reduced.

An overlapped pair, F of one micro-batch and B or I of another, runs by the model's own function once both of their
messages are there; without such a function one after the other. What they send leaves behind the pair in any case.

Neighbouring stages on one rank hand tensors over directly. An exception leaves with the attributes `stage`,
`microbatch` and `action`, so that whoever reports it can say where it happened. Once another rank has failed, the next
action is not begun, also where it waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled as profiling  # type: ignore[attr-defined]
from torch.profiler import record_function

from engine.pipeline.messages.boundary import Layout, Message, tensors_of
from engine.pipeline.messages.links import ONE_WAY, Links, Pending
from engine.pipeline.row import Feed, Row, long_row_of, row_of
from engine.pipeline.stage.overlap import Beside, LayerCall, Overlap, together
from engine.pipeline.stage.stage import Stage
from engine.plan.actions import Action, Op, Placement, Program
from engine.plan.timeline import Kind
from engine.telemetry.position import EVALUATING, Place, here, locate, named
from engine.telemetry.trace import Tracer


class StageUpdates(Protocol):
    """What a rank does with the gradients and the parameters of its stages, as its program says."""

    def ready(self, stage: int) -> None:
        """Return when the parameters of a stage may be used."""

    def closing(self, stage: int, waiting: Collection[Tensor] | None) -> None:
        """The last backward of a stage is next.

        `waiting` are the parameters whose gradients it adds where it is a W; None where it is a B, which may add any.
        """

    def reduce(self, stage: int) -> None:
        """Start what is left of the reduction of a stage's gradients."""

    def step(self, microbatch: int) -> None:
        """Wait for the reductions and update; `microbatch` is the last of the update in an asynchronous program."""

    def gather(self, stage: int) -> None:
        """Start to exchange the updated parameters of a stage."""


class Observer:
    """Told of what happens in a step; each of these does nothing unless a subclass overrides it."""

    def waiting(self) -> None:
        """The rank is about to wait: what can be done meanwhile costs nothing."""

    def before_update(self) -> None:
        """The gradients of an update are complete and summed over all copies, and not yet clipped."""

    def after_update(self) -> None:
        """An update is done."""


_KIND = {op: Kind(int(op)) for op in Op}


class Executor:
    """Runs rows of one rank over its `stages`.

    `updates` does what concerns gradients and parameters, `observer` is told when the rank waits. `overlap` is the
    model's own function for overlapped pairs, if it has one.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        links: Links,
        tracer: Tracer,
        updates: StageUpdates,
        observer: Observer,
        overlap: Overlap | None = None,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.links = links
        self.tracer = tracer
        self.peak_in_flight = 0
        self.peak_bytes = 0
        self._updates, self._observer, self._overlap = updates, observer, overlap
        self._rows: dict[int, tuple[Program, Row]] = {}
        self._feed: Feed
        self._halves: frozenset[tuple[int, int]]
        self._closing: frozenset[tuple[int, int]]
        self._placement: Placement
        self._posted: dict[tuple[Op, int, int], Pending] = {}
        self._handed: dict[tuple[Op, int, int], list[Tensor | None]] = {}
        self._outbox: dict[tuple[Op, int, int], list[Tensor | None]] = {}
        self._do: dict[Op, Callable[[int, int], Any]] = {
            Op.F: self._forward,
            Op.B: lambda stage, microbatch: self._backward(Kind.B, stage, microbatch),
            Op.I: lambda stage, microbatch: self._backward(Kind.I, stage, microbatch),
            Op.W: self._weights,
            Op.SEND_F: self._send_f,
            Op.RECV_F: self._recv_f,
            Op.SEND_B: self._send_b,
            Op.RECV_B: self._recv_b,
            Op.REDUCE: lambda stage, _: updates.reduce(stage),
            Op.STEP: self._step,
            Op.GATHER: lambda stage, _: updates.gather(stage),
        }

    def reset_peaks(self) -> None:
        """Restart peak tracking from the micro-batches that are in flight now."""
        self.peak_in_flight = self.peak_bytes = 0
        self._see_live()

    def run(self, program: Program, feed: Feed) -> None:
        """Execute this rank's row of `program`. In evaluation (no graph is kept) it holds forwards only.

        The executor keeps every program that it has unpacked: a run has one per number of micro-batches. Asynchronous
        ones are run once.
        """
        row = self._row(program)
        self._feed, self._halves, self._closing, self._placement = feed, row.halves, row.closing, row.placement
        self._position, self._phase = here(), 0 if feed.training else EVALUATING
        with torch.set_grad_enabled(feed.training):
            for unit in row.units:
                if len(unit) == 1:
                    self._act(*unit)
                else:
                    self._pair(*unit)
        assert not self._posted and not self._outbox and not self._handed, "a row left messages behind"

    def _row(self, program: Program) -> Row:
        if id(program) in self._rows:
            return self._rows[id(program)][1]
        if program.asynchronous:
            return long_row_of(program, self.rank)
        self._rows[id(program)] = program, row_of(program, self.rank)
        return self._rows[id(program)][1]

    def _act(self, action: Action) -> Any:
        """One action; the number of its span where it is a computation."""
        self._position[0] = action.pack() | self._phase
        try:
            self.links.check()
            if profiling():  # its own label costs more than the engine's own span
                with record_function(str(action)):
                    return self._do[action.op](action.stage, action.microbatch)
            return self._do[action.op](action.stage, action.microbatch)
        except BaseException as error:
            locate(error, Place(action.stage, action.microbatch, named(action, not self._feed.training)))
            raise

    def _pair(self, first: Action, second: Action) -> None:
        """An overlapped pair: together, by the model's own function, where the second does not need the first."""
        forward_and_backward = first.op is Op.F and second.op in (Op.B, Op.I)
        same = (first.stage, first.microbatch) == (second.stage, second.microbatch)
        if self._overlap is not None and forward_and_backward and not same:
            spans = self._together(self._overlap, first, second)
        else:
            spans = self._act(first), self._act(second)
        self.tracer.add_pair(*spans)

    def _together(self, overlap: Overlap, ahead: Action, behind: Action) -> tuple[int, int]:
        """Both of a pair by the model's function, with both of their messages there before it is called."""
        self._position[0] = ahead.pack()
        self.links.check()
        kind, place, spans = Kind(int(behind.op)), (behind.stage, behind.microbatch), []
        held = self.stages[behind.stage].held(behind.microbatch)
        try:
            arrived = self._gradients(*place)

            def backward() -> None:
                spans.append(self._give_back(kind, *place, *arrived))

            def beside(layers: Sequence[LayerCall], value: Any) -> Any:
                return together(overlap, layers, value, backward)

            span = self._forward(ahead.stage, ahead.microbatch, beside)
        except BaseException as error:
            locate(error, Place(ahead.stage, ahead.microbatch, f"({ahead};{behind})OVERLAP_F_B"))
            raise
        self._count_live(1, held)  # as if the backward had begun where the forward ended: both were alive
        return span, spans[0]

    # -- compute ---------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int, beside: Beside | None = None) -> int:
        feed, rows = self._feed, self._feed.sizes[microbatch]
        message = self._message(stage - 1, microbatch) if stage > 0 else None
        received = self._arrived(Op.RECV_F, stage, microbatch) if message else None
        given = None if message else feed.input(microbatch)
        last = stage == self._placement.stages - 1
        target = feed.target(microbatch) if last else None
        self._updates.ready(stage)
        start = self.tracer.mark()
        if feed.training:
            loss = (lambda output: feed.loss(output, target)) if last else None
            halves = (stage, microbatch) in self._halves
            output, total = self.stages[stage].forward(
                microbatch, received, given, message, feed.draw(microbatch), loss, rows, halves, beside
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
        span = self.tracer.add(Kind.F, stage, microbatch, start, self.tracer.mark())
        self._count_live()
        if not last:
            self._hand_on(output, stage, microbatch)
        return span

    def _backward(self, kind: Kind, stage: int, microbatch: int) -> int:
        """B, or its first half, I: what it hands on is the same."""
        return self._give_back(kind, stage, microbatch, *self._gradients(stage, microbatch))

    def _gradients(self, stage: int, microbatch: int) -> tuple[list[Tensor | None] | None, float | None]:
        """What a backward begins with: the gradients of the outputs, or on the last stage what the batch counted."""
        if stage == self._placement.stages - 1:
            return None, self._feed.count(microbatch)
        return self._arrived(Op.RECV_B, stage, microbatch), None

    def _give_back(
        self, kind: Kind, stage: int, microbatch: int, gradients: list[Tensor | None] | None, count: float | None
    ) -> int:
        """The backward itself."""
        if kind is Kind.B and (stage, microbatch) in self._closing:
            self._updates.closing(stage, None)
        start = self.tracer.mark()
        run = self.stages[stage].backward if kind is Kind.B else self.stages[stage].backward_input
        box = run(microbatch, gradients, count)
        span = self.tracer.add(kind, stage, microbatch, start, self.tracer.mark())
        if kind is Kind.I:
            self._count_live()
        if stage > 0:
            self._deliver(Op.SEND_B, stage, stage - 1, microbatch, box)
        return span

    def _weights(self, stage: int, microbatch: int) -> int:
        if (stage, microbatch) in self._closing:
            self._updates.closing(stage, self.stages[stage].waiting(microbatch))
        start = self.tracer.mark()
        self.stages[stage].backward_weight(microbatch)
        return self.tracer.add(Kind.W, stage, microbatch, start, self.tracer.mark())

    def _count_live(self, more: int = 0, nbytes: int = 0) -> None:
        """Keep the peaks; `more` micro-batches with `nbytes` were alive besides those that are now."""
        if self._feed.training:
            self._see_live(more, nbytes)

    def _see_live(self, more: int = 0, nbytes: int = 0) -> None:
        for stage in self.stages.values():
            more += stage.in_flight
            nbytes += stage.live_bytes
        self.peak_in_flight = max(self.peak_in_flight, more)
        self.peak_bytes = max(self.peak_bytes, nbytes)

    def _step(self, _: int, microbatch: int) -> None:
        self._updates.step(microbatch)
        if self._feed.updated is not None:
            self._feed.updated()

    # -- messages --------------------------------------------------------------------------------------------------

    def _hand_on(self, output: Any, stage: int, microbatch: int) -> None:
        """Check a stage's output against what the next stage expects, and pass it on."""
        difference = self._message(stage, microbatch).mismatch(output)
        if difference:
            raise ValueError(
                f"layer {self.stages[stage].layers[-1].name!r}, the last of stage {stage}, hands on something "
                f"else than in the trial at start-up: {difference.what}. {difference.advice}"
            )
        tensors: list[Tensor | None] = [t.detach() for t in tensors_of(output)]
        self._deliver(Op.SEND_F, stage, stage + 1, microbatch, tensors)

    def _deliver(self, op: Op, stage: int, neighbour: int, microbatch: int, tensors: list[Tensor | None]) -> None:
        if self._placement.rank(neighbour, microbatch) != self.rank:
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
        self._observer.waiting()
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
        peer = self._placement.rank(neighbour, microbatch)
        kind = "F" if op is Op.SEND_F else "B"
        self.links.send(peer, kind, layout, self._outbox.pop((op, stage, microbatch)), stage, microbatch)
        self.tracer.add(_KIND[op], stage, microbatch, start, self.tracer.mark())

    def _recv_f(self, stage: int, microbatch: int) -> None:
        self._post(Op.RECV_F, stage, stage - 1, microbatch, self._message(stage - 1, microbatch).forward)

    def _recv_b(self, stage: int, microbatch: int) -> None:
        self._post(Op.RECV_B, stage, stage + 1, microbatch, self._message(stage, microbatch).backward)

    def _post(self, op: Op, stage: int, neighbour: int, microbatch: int, layout: Layout) -> None:
        start = self.tracer.mark()
        peer = self._placement.rank(neighbour, microbatch)
        self._posted[op, stage, microbatch] = self.links.post(peer, "F" if op is Op.RECV_F else "B", layout)
        self.tracer.add(_KIND[op], stage, microbatch, start, self.tracer.mark())

    def _message(self, producer: int, microbatch: int) -> Message:
        """What stage `producer` hands on for a micro-batch."""
        return self._feed.messages[self._feed.sizes[microbatch]][producer]
