"""The state of the whole model, gathered from its stages and handed out to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from engine.collectives import Group
from engine.distributed.broadcast import broadcast_value
from engine.errors import refusing, said
from engine.pipeline.stage.stage import Stage
from engine.plan.actions import Placement
from engine.transport import Transport

MOST_NAMED = 5


class WholeState:
    """The state of the whole model: gathered on every rank, and loaded into the `stages` of this one.

    Channels between any two ranks are opened when they are first needed.
    """

    def __init__(self, stages: Mapping[int, Stage], placement: Placement, transport: Transport, label: str) -> None:
        self._stages, self._placement, self._transport, self._label = stages, placement, transport, f"{label}state"
        self._group: Group | None = None

    def _everybody(self) -> Group:
        if self._group is None:  # not a cached_property, whose lock all ranks that are threads would share
            ranks = range(self._transport.world)
            self._transport.open(Group.edges(ranks, self._label))
            self._group = Group(self._transport, ranks, self._label)
        return self._group

    def gather(self) -> dict[str, Any]:
        """Name -> a copy on the CPU, in the order of the model: what the first copies of replica 0 hold."""
        state: dict[str, Any] = {}
        for stage in range(self._placement.stages):
            own = self._stages[stage].state_dict() if self._owns(stage) else {}
            state |= self._from_owner(stage, {name: _copy(value) for name, value in own.items()})
        return state

    def load(self, state: Mapping[str, Any], strict: bool) -> _IncompatibleKeys:
        """Copy what of `state` is this rank's; the names that are missing and that are unknown."""
        known: dict[str, Any] = {}  # name -> shape, None of what is no tensor
        for stage in range(self._placement.stages):
            own = self._stages[stage].state_dict() if self._owns(stage) else {}
            known |= self._from_owner(stage, {name: _shape(value) for name, value in own.items()})
        missing, unknown = [n for n in known if n not in state], [n for n in state if n not in known]
        if strict and (missing or unknown):
            parts = [
                f"{what} {_listed(names)}" for what, names in (("lacks", missing), ("has unknown", unknown)) if names
            ]
            raise ValueError(f"the state {' and '.join(parts)}: load that of the same model, or give strict=False")
        wrong = [
            f"{name} is {_shape(state[name])} and has to be {shape}"
            for name, shape in known.items()
            if name in state and _shape(state[name]) != shape
        ]
        if wrong:
            raise ValueError(f"tensors of the state have other shapes: {_listed(wrong)}: load that of the same model")
        take(self._stages.values(), state)
        return _IncompatibleKeys(missing, unknown)

    def _owns(self, stage: int) -> bool:
        return self._transport.rank == self._placement.rank_of[0][stage]

    def _from_owner(self, stage: int, value: Any) -> Any:
        if self._transport.world == 1:
            return value
        return broadcast_value(value, self._placement.rank_of[0][stage], self._everybody())


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def take(stages: Iterable[Stage], state: Mapping[str, Any]) -> None:
    """Copy what of `state` belongs to these stages into their layers, in place; ValueError where a layer refuses it."""
    for held in stages:
        for layer in held.layers:
            names = {f"{layer.prefix}{key}": key for key in layer.module.state_dict()}
            own = {key: state[name] for name, key in names.items() if name in state}
            with refusing(lambda error: f"layer {layer.name!r} does not take its state: {said(error)}"):  # noqa: B023
                layer.module.load_state_dict(own, strict=False)


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
