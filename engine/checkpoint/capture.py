"""The training state of one rank, as tensors and plain data: taken from a pipeline, and put back into one.

    parameters           once, from the first copy of a stage in replica 0
    buffers, loss        of every copy and replica: running statistics differ
    optimizer            by the parameter's name; of a divided optimizer each rank has the parts that it updates
    groups, scheduler    plain data

Nothing in it is a rank's number or a position in a list, so another cut, schedule or number of replicas takes from it
what it needs. What is drawn (weights, masks, the order of samples) follows from seed and step, and has no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.checkpoint import plain
from engine.checkpoint.manifest import TRANSIENT, Group, Stored, Update
from engine.checkpoint.reader import Reader
from engine.gradients.layout import dense_strides
from engine.pipeline.pipeline import Pipeline
from engine.weights.model_file import unstorable


class Updated(NamedTuple):
    """What this rank's optimizer is given for one parameter: all of it, or the flat elements from `first` on."""

    name: str
    given: nn.Parameter
    whole: nn.Parameter
    first: int
    flat: bool
    owned: bool  # its state is this rank's to store


@dataclass
class RankState:
    """Copies of what one rank stores. `tensors`: by their name in its file; `stored`: what each of them is."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    stored: list[Stored] = field(default_factory=list)
    update: Update | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def add(self, file: str, kind: Any, name: str, value: Tensor, **more: Any) -> None:
        """Copy a tensor."""
        key = f"{len(self.tensors):06d}"
        self.tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        entry = {"shape": tuple(value.shape)} | more
        self.stored.append(Stored(kind=kind, name=name, file=file, tensor=key, **entry))


def capture(pipeline: Pipeline, file: str) -> RankState:
    """Copy what this rank stores, for its file `file`. ValueError naming what a checkpoint cannot hold."""
    state = RankState()
    pipeline.updater.all_ready()
    for index, copy, owned in _stages(pipeline):
        stage, whose = pipeline.stages[index], {"replica": pipeline.replica, "copy_": copy}
        told, parameters, buffers = stage.state_dict(), dict(stage.all_parameters()), dict(stage.named_buffers())
        for name, parameter in parameters.items() if owned else ():
            state.add(file, "parameter", name, parameter, key="" if name in told else TRANSIENT)
        for name, buffer in buffers.items():
            state.add(file, "buffer", name, buffer, key="" if name in told else TRANSIENT, **whose)
        for name, value in told.items() if owned else ():
            if not isinstance(value, Tensor):
                state.extra[name] = plain.encode(value, f"the state {name}")
            elif name not in parameters and name not in buffers:  # a second name of a tensor
                state.add(file, "parameter", name, value)
        if index == pipeline.tables.placement.stages - 1 and pipeline.loss.module is not None:
            for name, value in pipeline.loss.module.state_dict().items():
                state.add(file, "loss", name, value, **whose)
    _capture_update(pipeline, file, state)
    if wrong := unstorable(state.tensors):
        numbers = {entry.tensor: entry.name for entry in state.stored}
        names = [numbers[key] for key, value in state.tensors.items() if unstorable({key: value})]
        raise ValueError(f"a checkpoint cannot hold {', '.join(names[:5])} ({wrong.partition('(')[2]}")
    return state


def _stages(pipeline: Pipeline) -> Iterator[tuple[int, int, bool]]:
    """(stage, number of the copy that this rank holds, whether the copy stands for the stage)."""
    placement = pipeline.tables.placement
    for index in sorted(pipeline.stages):
        copy = placement.ranks_of(index).index(pipeline.rank) if placement.copies > 1 else 0
        yield index, copy, pipeline.replica == 0 and placement.rank_of[0][index] == pipeline.rank


def updated(pipeline: Pipeline) -> list[Updated]:
    """What this rank's optimizer updates, by name, in the order in which it was given."""
    updater, found = pipeline.updater, []
    if updater.sharded:
        for reducer in [*updater.sharded.values(), *updater.sharded_ties.values()]:
            for number, given, first, flat in reducer.pieces:
                name, whole = reducer.named[number]
                found.append(Updated(name, given, whole, first, flat, True))
        return found
    owned = {index for index, _, owns in _stages(pipeline) if owns}
    known: dict[nn.Parameter, tuple[str, int]] = {}  # tied weights: under one name, stored once
    for index in sorted(pipeline.stages):
        for name, parameter in pipeline.stages[index].named_parameters():
            known.setdefault(parameter, updater.owner_of(parameter) or (name, index))
    return [Updated(name, p, p, 0, False, owner in owned) for p, (name, owner) in known.items()]


def _capture_update(pipeline: Pipeline, file: str, state: RankState) -> None:
    update, given = pipeline.updater.update, updated(pipeline)
    if update.optimizer is None or not any(each.owned for each in given):
        return
    names = {id(each.given): each.name for each in given}
    others: dict[str, dict[str, Any]] = {}
    for each in given:
        for key, value in update.optimizer.state.get(each.given, {}).items() if each.owned else ():
            if isinstance(value, Tensor):
                cut = each.flat and value.shape == each.given.shape
                span = (each.first, each.first + each.given.numel()) if cut else None
                more = (
                    {"span": span, "stride": dense_strides(each.whole), "shape": tuple(each.whole.shape)} if cut else {}
                )
                state.add(file, "optimizer", each.name, value, key=str(key), **more)
            else:
                others.setdefault(each.name, {})[str(key)] = plain.encode(
                    value, f"the optimizer's {key} of {each.name}"
                )
    groups = [
        Group(
            parameters=tuple(dict.fromkeys(names[id(p)] for p in group["params"])),
            options={k: plain.encode(v, f"the optimizer's {k}") for k, v in group.items() if k != "params"},
        )
        for group in update.optimizer.param_groups
    ]
    scheduler = None
    if update.scheduler is not None:
        scheduler = plain.encode(update.scheduler.state_dict(), "the scheduler's state")
    state.update = Update(groups=tuple(groups), scheduler=scheduler, state=others)


@torch.no_grad()
def restore(pipeline: Pipeline, reader: Reader) -> None:
    """Put a stored state into this rank's stages, loss, optimizer and scheduler. ValueError for what does not fit."""
    pipeline.updater.all_ready()
    last = pipeline.tables.placement.stages - 1
    for index, copy, _ in _stages(pipeline):
        stage, whose = pipeline.stages[index], (pipeline.replica, copy)
        for name, parameter in stage.all_parameters():
            parameter.copy_(reader.parameter(name, parameter.shape))
        for name, buffer in stage.named_buffers():
            if (value := reader.buffer("buffer", name, buffer.shape, *whose)) is not None:
                buffer.copy_(value)
        _restore_extra(stage.layers, reader.extra)
        if index == last and pipeline.loss.module is not None:
            for name, value in pipeline.loss.module.state_dict().items():
                if (stored := reader.buffer("loss", name, value.shape, *whose)) is not None:
                    value.copy_(stored)
    _restore_update(pipeline, reader)


def _restore_extra(layers: Any, extra: dict[str, Any]) -> None:
    for layer in layers:
        own = {
            f"{layer.prefix}{key}": key
            for key, value in layer.module.state_dict().items()
            if not isinstance(value, Tensor)
        }
        if found := {key: plain.decode(extra[name]) for name, key in own.items() if name in extra}:
            layer.module.load_state_dict(found, strict=False)


def _restore_update(pipeline: Pipeline, reader: Reader) -> None:
    update, given = pipeline.updater.update, updated(pipeline)
    if update.optimizer is None:
        return
    optimizer, by_id = update.optimizer, {id(each.given): each for each in given}
    groups, states, number = [], {}, 0
    for group in optimizer.param_groups:
        own = [by_id[id(p)] for p in group["params"]]
        options = reader.options([each.name for each in own])
        groups.append(options | {"params": list(range(number, number + len(own)))})
        for each in own:
            if values := reader.optimizer(each.name):
                states[number] = {key: _part(each, value) for key, value in values.items()}
            number += 1
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, stored in states.items():  # torch converts to the parameter's dtype: what is kept wider stays so
        kept = optimizer.state[flat[place]]
        for key, value in stored.items():
            if isinstance(value, Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device)
    if update.scheduler is not None and (scheduler := reader.scheduler([each.name for each in given])) is not None:
        update.scheduler.load_state_dict(scheduler)


def _part(each: Updated, value: Any) -> Any:
    """Of a whole value what belongs to this rank's part of the parameter."""
    if not (isinstance(value, Tensor) and each.flat and value.shape == each.whole.shape):
        return value
    ordered = torch.empty_strided(value.shape, dense_strides(each.whole), dtype=value.dtype).copy_(value)
    flat = ordered.as_strided((value.numel(),), (1,))
    return flat[each.first : each.first + each.given.numel()].clone()
