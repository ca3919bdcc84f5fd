"""One stage of the model on one rank: its layers, and the graphs of the micro-batches that are in flight.

    received tensors ─ gates ─ layers ─ outputs          F keeps: the gates' box, gradient edges of the outputs
    box of gradients ◄─ gates ◄───────── gradients       B consumes them, or I does and leaves some work for W

Of an output only its gradient edge is kept: the tensor itself is free once it is sent, so what stays alive per
micro-batch is what autograd saved. The last stage ends in the loss: F computes its sum, B or I starts from
sum / (what the global batch counted); nothing else is divided anywhere. A micro-batch whose backward comes in halves
goes through the layers under the routing of `split`; any other goes through plain torch. Where an asynchronous schedule
keeps several versions of the weights, both run on the version that the micro-batch reads (`versions`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.pipeline.messages.boundary import Message, tensors_of
from engine.pipeline.seeds import drawing_again, seeded
from engine.pipeline.stage.activations import recomputes, saved_bytes
from engine.pipeline.stage.overlap import Beside, LayerCall
from engine.pipeline.stage.split import Later, Routing
from engine.pipeline.stage.versions import Versions
from engine.pipeline.ties import prefix_of
from engine.telemetry.trace import Tracer


class StageLayer(NamedTuple):
    """One layer of a stage; `number` counts through the whole model."""

    number: int
    name: str
    module: nn.Module

    @property
    def prefix(self) -> str:
        """What stands before the names of the module's tensors in those of the unsplit model."""
        return prefix_of(self.name, self.module)


class Draw(NamedTuple):
    """What a forward's random numbers depend on, besides the run's seed and the layer."""

    step: int
    microbatch: int
    replica: int


@dataclass(slots=True)
class _Live:
    """A micro-batch between its forward and its (input-)backward. `later` is given where that is a half."""

    box: list[Tensor | None]
    roots: list[Any]  # gradient edges of the outputs that require grad, in the order of the message
    loss: Tensor | None
    nbytes: int
    later: Later | None


class Stage:
    """Stage `index`: its layers, in order, on `device`; `seed` is the run's, `autocast` the context of its forwards.

    `draws` holds the numbers of the layers that are seeded before each forward, and where the loss draws the number
    behind the last layer's; it may grow until the first forward. `tracer` is told what each layer of a forward in
    training takes. `asynchronous`: several versions of the weights are kept.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[StageLayer],
        device: torch.device,
        seed: int,
        draws: Collection[int] = (),
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        tracer: Tracer | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.device = device
        self.seed = seed
        self.tracer = tracer
        self.versions = Versions(index, [layer.module for layer in layers]) if asynchronous else None
        self._draws, self._autocast = draws, autocast
        self.live_bytes = 0  # kept by autograd for micro-batches in flight, and for weight gradients to come
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._live: dict[int, _Live] = {}
        self._later: dict[int, tuple[Later, int]] = {}  # between I and W: what is left to do, and the bytes it holds
        self._saved: dict[int, int] = {}  # micro-batch size -> bytes that its forward leaves
        self._saved_by: dict[int, dict[int, int]] = {}  # the same by the number of the layer; beyond the last: the loss
        self._draws_again = False  # a backward here runs layers again that draw
        self._reached: list[tuple[int, list[Any]]] | None = None  # layers and the nodes that end them, where wanted

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters under their full names, in model order."""
        return [(name, p) for name, p in self._named("named_parameters") if p.requires_grad]

    def all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under their full names, frozen ones too, in model order."""
        return self._named("named_parameters")

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers under their full names, in model order."""
        return self._named("named_buffers")

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers under their full names; the tensors themselves, no copies."""
        return {
            f"{layer.prefix}{key}": value for layer in self.layers for key, value in layer.module.state_dict().items()
        }

    def _named(self, what: str) -> list[tuple[str, Any]]:
        every = [
            (f"{layer.prefix}{key}", value) for layer in self.layers for key, value in getattr(layer.module, what)()
        ]
        first = {id(value): name for name, value in reversed(every)}  # layers may share tensors
        return [(name, value) for name, value in every if first[id(value)] == name]

    def run(self, value: Any, draw: Draw | None) -> Any:
        """The output of the layers, run one after another; `draw` is None in evaluation."""
        with self._autocast():
            for layer in self.layers:
                value = self._through(layer, value, draw)
        return value

    def _through(self, layer: StageLayer, value: Any, draw: Draw | None) -> Any:
        if draw is None:
            return layer.module(value)
        start = None if self.tracer is None else self.tracer.mark()
        with seeded(layer.number in self._draws, self.device, self.seed, "draw", layer.number, *draw):
            value = layer.module(value)
        if self.tracer is not None:
            self.tracer.add_layer(layer.number, start, self.tracer.mark())
        if self._reached is not None:
            self._reached.append((layer.number, [tensor.grad_fn for tensor in tensors_of(value)]))
        return value

    def _run_routed(self, value: Any, draw: Draw, later: Later | None, beside: Beside | None) -> Any:
        """The layers of a forward in training. Where other work runs beside them, a layer's contexts end with it."""
        routing = nullcontext if later is None else lambda: Routing(later)
        if beside is None:
            with routing():
                return self.run(value, draw)

        def call(layer: StageLayer, value: Any) -> Any:
            with self._autocast(), routing():
                return self._through(layer, value, draw)

        return beside([LayerCall(x.name, x.module, partial(call, x)) for x in self.layers], value)

    def forward(
        self,
        microbatch: int,
        received: Sequence[Tensor | None] | None,
        given: Any,
        message: Message | None,
        draw: Draw,
        loss: Callable[[Any], Tensor] | None,
        rows: int,
        halves: bool = False,
        beside: Beside | None = None,
    ) -> tuple[Any, Tensor | None]:
        """Forward of a micro-batch of `rows` samples in training: the output, and on the last stage the loss sum.

        The input is `given` on the first stage, else the `received` tensors of `message`. `halves`: its backward will
        be `backward_input` and `backward_weight`. `beside` runs the layers, where something else runs meanwhile.
        """
        box: list[Tensor | None] = []
        if message is not None:
            assert received is not None
            given, box = message.enter(received, self._anchor)
        later = Later() if halves else None
        self._reached = None if rows in self._saved else []
        if self.versions is None:
            output = self._run_routed(given, draw, later, beside)
        else:
            output = self.versions.forward(microbatch, lambda: self._run_routed(given, draw, later, beside))
        total = None
        if loss is not None:
            total = self._scored(loss, output, draw)
            roots = []
        else:
            wanting = [t for t in tensors_of(output) if t.requires_grad]
            roots = [torch.autograd.graph.get_gradient_edge(t) for t in wanting]
        if self._reached is not None:
            last = self.layers[-1].number
            after = (last, tensors_of(output)) if total is None else (self._loss_number, [total])
            self._count([*self._reached, (after[0], [t.grad_fn for t in after[1]])], microbatch, rows)
        self._live[microbatch] = _Live(box, roots, total, self._saved[rows], later)
        self.live_bytes += self._saved[rows]
        return output, None if total is None else total.detach()

    def _scored(self, loss: Callable[[Any], Tensor], output: Any, draw: Draw) -> Tensor:
        """The loss sum; it is timed as what follows the last layer."""
        start = None if self.tracer is None else self.tracer.mark()
        with self._autocast(), seeded(self._loss_number in self._draws, self.device, self.seed, "draw", "loss", *draw):
            total = loss(output)
        if self.tracer is not None:
            self.tracer.add_layer(self._loss_number, start, self.tracer.mark())
        return total

    def _count(self, parts: list[tuple[int, list[Any]]], microbatch: int, rows: int) -> None:
        """What the forward of a micro-batch of `rows` samples has left for its backward, by layers and their ends."""
        weights: list[Tensor] = [p for layer in self.layers for p in layer.module.parameters()]
        read = [] if self.versions is None else self.versions.tensors(microbatch)
        found = saved_bytes([nodes for _, nodes in parts], weights + read)
        if any(layer.number in self._draws for layer in self.layers):
            self._draws_again |= recomputes(node for _, ends in parts for node in ends)
        by_layer = self._saved_by.setdefault(rows, {})
        for (number, _), nbytes in zip(parts, found, strict=True):
            by_layer[number] = by_layer.get(number, 0) + nbytes
        self._saved[rows], self._reached = sum(found), None

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None, count: float | None
    ) -> list[Tensor | None]:
        """Full backward of a micro-batch: accumulates into `.grad`, returns the gradients of the received tensors.

        On the last stage `count` is what the global batch counted; a batch that counted nothing adds nothing.
        """
        live = self._live.pop(microbatch)
        self.live_bytes -= live.nbytes
        assert live.later is None, "a micro-batch whose backward comes in halves"
        start = _start(live, gradients, count)
        with drawing_again(self._draws_again):
            if self.versions is None:
                torch.autograd.backward(*start)
            else:
                self.versions.backward(microbatch, lambda: torch.autograd.backward(*start))
        return live.box

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None, count: float | None
    ) -> list[Tensor | None]:
        """Backward of a micro-batch without the weight gradients that can wait: what only these need stays alive."""
        live = self._live.pop(microbatch)
        self.live_bytes -= live.nbytes
        assert live.later is not None, "a micro-batch whose backward comes whole"
        with drawing_again(self._draws_again):
            live.later.backward(*_start(live, gradients, count))
        self._later[microbatch] = live.later, live.later.nbytes
        self.live_bytes += live.later.nbytes
        return live.box

    def backward_weight(self, microbatch: int) -> None:
        """Add the weight gradients that `backward_input` has left to `.grad`."""
        later, held = self._later.pop(microbatch)
        self.live_bytes -= held
        later.run()

    def waiting(self, microbatch: int) -> set[Tensor]:
        """The parameters whose gradients `backward_weight` will add."""
        return self._later[microbatch][0].parameters

    def held(self, microbatch: int) -> int:
        """Bytes that autograd keeps for one micro-batch in flight."""
        return self._live[microbatch].nbytes

    @property
    def _loss_number(self) -> int:
        """What stands for the loss where layers are numbered: it follows the last one."""
        return self.layers[-1].number + 1

    @property
    def largest(self) -> int:
        """Samples of the largest micro-batch so far; 0 before the first."""
        return max(self._saved, default=0)

    @cached_property
    def parameter_bytes(self) -> dict[int, int]:
        """A layer's number -> bytes of its parameters."""
        return {layer.number: sum(p.nbytes for p in layer.module.parameters()) for layer in self.layers}

    def saved_by_layer(self) -> dict[int, int]:
        """A layer's number -> bytes that the largest micro-batch so far left there; beyond the last one the loss."""
        return self._saved_by.get(self.largest, {})

    @property
    def in_flight(self) -> int:
        """Micro-batches whose forward ran and whose (input-)backward did not."""
        return len(self._live)


def _start(
    live: _Live, gradients: Sequence[Tensor | None] | None, count: float | None
) -> tuple[list[Any], list[Tensor | None]]:
    """Where a backward begins, and with which gradients: nowhere, if nothing counted or no gradient is there."""
    if live.loss is not None:
        return ([live.loss / count], [None]) if live.loss.requires_grad and count else ([], [])
    assert gradients is not None
    pairs = [(root, gradient) for root, gradient in zip(live.roots, gradients, strict=True) if gradient is not None]
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]
