"""The end of a step on one rank: gradients are reduced over copies, clipped by the norm of the whole model, applied.

    closing(stage)   the last backward of a stage is next: full buckets of its gradients start to travel
    REDUCE           whatever has not started does
    STEP             weights that are tied between stages; wait for all, clip, optimizer, zero
    GATHER           where the optimizer is divided: updated parameters are exchanged; ready(stage) waits for them

Whoever holds a copy of a parameter sums its gradients: the copies of a stage for what is that stage's alone, and those
of several stages for the weights that these share, which are complete with the last backward of all of them.

Without an optimizer STEP only waits: `.grad` then holds what one process would have, summed over the micro-batches of
all replicas, added to what was there before the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from engine.gradients.background import ReduceThread
from engine.gradients.buckets import Reducer
from engine.gradients.division import Division
from engine.gradients.grad_hooks import GradHooks
from engine.gradients.order import Order
from engine.gradients.shards import ShardedReducer
from engine.job import Tie
from engine.pipeline.communicators import Communicators, StageSet
from engine.pipeline.executor import Observer
from engine.pipeline.stage.stage import Stage
from engine.pipeline.ties import stage_sets
from engine.pipeline.updates.norms import Norms, PieceNorms, Update
from engine.plan.actions import Placement
from engine.plan.timeline import Kind
from engine.telemetry.trace import Tracer

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class UpdateRules:
    """How parameters are updated. `optimizer` and `lr_scheduler` make them, from parameters and from the optimizer.

    `clip_norm` is the largest p-norm of all gradients of the model, p = `clip_norm_type` (None: infinity). `division`
    divides the optimizer's work over the copies of a stage. `bucket_bytes`: gradients that are reduced at once.
    """

    optimizer: Callable[[list[nn.Parameter]], Any] | None = None
    lr_scheduler: Callable[[Any], Any] | None = None
    clip_norm: float | None = None
    clip_norm_type: float | None = 2.0
    division: type[Division] | None = None
    bucket_bytes: int = BUCKET_BYTES


@dataclass(frozen=True)
class Numbering:
    """Where parameters stand in the whole model.

    `trainable[i]`: parameter tensors of layer i that require grad; `split[s]`: the first layer of stage s; `dtype`: the
    parameters'; `ties`: those that layers share, which have the place of their owner's.
    """

    placement: Placement
    split: tuple[int, ...]
    trainable: tuple[int, ...]
    dtype: torch.dtype
    ties: tuple[Tie, ...] = ()

    @property
    def total(self) -> int:
        """Trainable parameter tensors of the model."""
        return sum(self.trainable)

    def own(self, stage: Stage) -> list[tuple[int, nn.Parameter]]:
        """(place, parameter) of what a stage holds, in model order, without what an earlier layer owns."""
        lent = {home for tie in self.ties for home in tie.homes[1:]}
        found, first = [], [0, *accumulate(self.trainable)]
        for layer in stage.layers:
            named = [(name, p) for name, p in layer.module.named_parameters() if p.requires_grad]
            places = range(first[layer.number], first[layer.number] + len(named))
            found += [(at, p) for at, (name, p) in zip(places, named, strict=True) if (layer.number, name) not in lent]
        return found

    def between(self, stages: Mapping[int, Stage]) -> dict[StageSet, dict[int, tuple[str, nn.Parameter]]]:
        """What some of these stages share with others: the sharing stages -> place -> (owner's name, parameter)."""
        modules = {layer.number: layer.module for stage in stages.values() for layer in stage.layers}
        return {
            sharing: {
                tie.place: (tie.name, next(modules[at].get_parameter(key) for at, key in tie.homes if at in modules))
                for tie in ties
                if tie.place is not None
            }
            for sharing, ties in stage_sets(self.ties, self.split).items()
            if any(stage in stages for stage in sharing)
        }


class Updater:
    """Gradients and parameters of one rank's `stages`; the executor's `StageUpdates`."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        communicators: Communicators,
        rules: UpdateRules,
        numbering: Numbering,
        device: torch.device,
        tracer: Tracer,
        observer: Observer,
    ) -> None:
        self.stages, self.rules = stages, rules
        self.norm: float | None = None  # of the gradients of the last update, where they are clipped
        self._communicators, self._numbering, self._device = communicators, numbering, device
        self._tracer, self._observer = tracer, observer
        self._thread, self._order = ReduceThread(), Order()
        self._shared = numbering.between(stages)
        self._tied = {p for each in self._shared.values() for _, p in each.values()}
        reduced = sorted(stages, reverse=True) if communicators.reduces else []  # in the order of their REDUCE actions
        self.reducers: dict[int, Reducer] = {s: self._reducer(s) for s in reduced}
        self.tied = {
            sharing: self._summing([*each.values()], sharing)
            for sharing, each in self._shared.items()
            if len(communicators.sharing[sharing].members) > 1
        }
        self.sharded = {s: r for s, r in sorted(self.reducers.items()) if isinstance(r, ShardedReducer)}
        self.sharded_ties = {s: r for s, r in self.tied.items() if isinstance(r, ShardedReducer)}
        self.update = self._update()
        self._hooks = [GradHooks([p for _, p in reducer.named], reducer.seen) for reducer in self.reducers.values()]
        self.clip_norms = self.norms(rules.clip_norm_type)
        self._earlier: list[tuple[nn.Parameter, Tensor]] = []  # gradients of steps before this one

    def _reducer(self, stage: int) -> Reducer:
        named = self.stages[stage].named_parameters()
        return self._summing([(name, p) for name, p in named if p not in self._tied], stage)

    def _summing(self, named: list[tuple[str, nn.Parameter]], held: int | StageSet) -> Reducer:
        """Sums the gradients of parameters over all ranks that hold a copy."""
        rest = (self.rules.bucket_bytes, self._thread, self._order)
        if self.rules.division is not None:
            return ShardedReducer(named, self._communicators.sharing[held], *rest, self.rules.division)
        return Reducer(named, self._communicators.reduction[held], *rest)

    def _update(self) -> Update:
        parameters = self.parameters
        optimizer = self.rules.optimizer(parameters) if self.rules.optimizer and parameters else None
        scheduler = self.rules.lr_scheduler(optimizer) if self.rules.lr_scheduler and optimizer else None
        return Update(parameters, optimizer, scheduler, self.rules.clip_norm)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates: trainable parameters in model order, or this rank's pieces of them."""
        if self.sharded:
            reducers = [*self.sharded.values(), *self.sharded_ties.values()]
            return [piece.parameter for reducer in reducers for piece in reducer.pieces]
        return list(dict.fromkeys(p for s in sorted(self.stages) for _, p in self.stages[s].named_parameters()))

    def norms(self, norm_type: float | None) -> Norms:
        """The p-norm of the gradients of the whole model, as this rank takes part in it.

        Of two copies of a stage the first counts, or of a divided optimizer this rank's pieces.
        """
        communicators, numbering = self._communicators, self._numbering
        power = math.inf if norm_type is None else norm_type
        rest = numbering.dtype, self._device, power
        if self.sharded:
            pieces = [(self._places(s)[piece.number], piece) for s, r in self.sharded.items() for piece in r.pieces]
            for sharing, reducer in self.sharded_ties.items():
                places = list(self._shared[sharing])
                pieces += [(places[piece.number], piece) for piece in reducer.pieces]
            return PieceNorms(
                [piece.parameter for _, piece in pieces], [place for place, _ in pieces], numbering.total,
                communicators.sum_over_everybody, *rest, member=communicators.me, members=communicators.world,
            )  # fmt: skip
        counted = numbering.placement.first_copies(communicators.rank)
        own = [each for s in counted for each in numbering.own(self.stages[s])]
        places, parameters = [place for place, _ in own], [p for _, p in own]
        return Norms(parameters, places, numbering.total, communicators.sum_over_pipeline, *rest)

    def _places(self, stage: int) -> list[int]:
        """Of the parameters that are a stage's alone."""
        return [place for place, p in self._numbering.own(self.stages[stage]) if p not in self._tied]

    def owner_of(self, parameter: nn.Parameter) -> tuple[str, int] | None:
        """Of a weight that is tied between stages: its name in the unsplit model, and the stage that owns it."""
        for sharing, each in self._shared.items():
            for name, tied in each.values():
                if tied is parameter:
                    return name, sharing[0]
        return None

    @property
    def bytes_sent(self) -> int:
        """Bytes that the reductions so far have sent from this rank."""
        return sum(reducer.bytes_sent for reducer in [*self.reducers.values(), *self.tied.values()])

    def begin(self) -> None:
        """A step begins: without an optimizer, gradients of earlier steps are put aside until the new ones are reduced.

        A reduction takes what is in `.grad` for this rank's own share, and hands back a buffer that it uses again.
        """
        if self.rules.optimizer is not None or not (self.reducers or self.tied):
            return
        held = [(p, p.grad) for p in self._trained() if p.grad is not None]
        self._earlier = [(p, grad.clone()) for p, grad in held]
        for parameter, _ in held:
            parameter.grad = None

    def _trained(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for stage in self.stages.values() for _, p in stage.named_parameters()))

    def ready(self, stage: int) -> None:
        """Wait until the parameters of a stage are whole, where its optimizer is divided."""
        if stage not in self.sharded:
            return
        for reducer in [self.sharded[stage], *(r for sharing, r in self.sharded_ties.items() if stage in sharing)]:
            start = self._tracer.mark()
            if reducer.gathered():
                self._tracer.add(Kind.WAIT_GATHER, stage, -1, start, self._tracer.mark())
                self._tracer.add_host(Kind.GATHER, stage, -1, *reducer.gather_span)

    def all_ready(self) -> None:
        """Wait until the parameters of all stages on this rank are whole."""
        for stage in self.stages:
            self.ready(stage)

    def closing(self, stage: int, waiting: Collection[Tensor] | None) -> None:
        """A bucket of a stage's gradients is reduced as soon as they are there."""
        reducer = self.reducers[stage]
        reducer.expect()
        for number, (_, parameter) in enumerate(reducer.named if waiting is not None else ()):
            if waiting is not None and parameter not in waiting:  # what does not wait for it is there
                reducer.seen(number)

    def reduce(self, stage: int) -> None:
        """REDUCE: start what is left of a stage's reduction."""
        self.reducers[stage].launch()

    def gather(self, stage: int) -> None:
        """GATHER: exchange the updated parameters of a stage in the background; behind the last one's the tied."""
        self.sharded[stage].gather()
        if stage == max(self.stages):
            for reducer in self.sharded_ties.values():
                reducer.gather()

    def step(self, microbatch: int) -> None:
        """STEP: the reductions are awaited, the gradients clipped, the parameters updated."""
        self.await_reductions()
        self._apply(microbatch)
        self._observer.after_update()

    def _apply(self, microbatch: int) -> None:
        mark, add = self._tracer.mark, self._tracer.add
        norm = None
        if self.update.clip_norm is not None:
            start = mark()
            norm = self.clip_norms.total()
            add(Kind.WAIT_NORM, -1, -1, start, mark())
            self.norm = float(norm)
        start = mark()
        self._observer.before_update()
        with ExitStack() as stack:
            for stage in self.stages.values():
                if stage.versions is not None:
                    stack.enter_context(stage.versions.updating())
            self.update.clip(norm)
            self.update.apply()
        add(Kind.STEP, -1, microbatch, start, mark())

    def await_reductions(self) -> None:
        """Wait for the reductions of all stages here, and do those of tied weights.

        On all ranks these come behind the others, in one order.
        """
        for reducer in self.tied.values():
            reducer.launch()
        tied = [(next(s for s in sharing if s in self.stages), reducer) for sharing, reducer in self.tied.items()]
        for stage, reducer in [*self.reducers.items(), *tied]:
            start = self._tracer.mark()
            reducer.wait()
            self._tracer.add(Kind.WAIT_REDUCE, stage, -1, start, self._tracer.mark())
            for ready, begun, ended in reducer.spans:
                self._tracer.add_host(Kind.QUEUED, stage, -1, ready, begun)
                self._tracer.add_host(Kind.REDUCE, stage, -1, begun, ended)
        for parameter, gradient in self._earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._earlier = []

    def close(self) -> None:
        """Wait for what is exchanged, and leave the parameters as plain ones."""
        self.all_ready()
        for hooks in self._hooks:
            hooks.close()
        self._thread.close()
