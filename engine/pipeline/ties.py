"""Weights that several layers share (tied weights), wherever these layers are.

A weight is tied where two layers hold the same tensor, or where a layer says so of a weight of its own:

    class Head(nn.Linear):
        tied = {"weight": "embedding.token.weight"}     own name -> name in the unsplit model

The first layer in model order owns it. Layers on one rank hold one tensor. On different ranks each has a copy, and the
ranks that hold a copy sum its gradients as replicas do; so they stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from engine.job import Tie

StageSet = tuple[int, ...]


def find_ties(names: Sequence[str], modules: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """The weights that several of these layers share; those that layers declare are shared from here on.

    ValueError for a declared one that is not there, or of another shape.
    """
    first: dict[nn.Parameter, tuple[int, str]] = {}
    homes: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for layer, module in enumerate(modules):
        _share_declared(names, modules, layer)
        for name, parameter in module.named_parameters():
            owner = first.setdefault(parameter, (layer, name))
            homes.setdefault(owner, []).append((layer, name))
    places: dict[tuple[int, str], int] = {}
    for layer, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                places[layer, name] = len(places)
    found = []
    for (layer, name), each in homes.items():
        if len(each) > 1:
            full = prefix_of(names[layer], modules[layer]) + name
            found.append(Tie(full, tuple(each), places.get((layer, name))))
    return tuple(found)


def prefix_of(name: str, module: nn.Module) -> str:
    """What stands before the names of a layer's tensors in those of the unsplit model."""
    return "" if getattr(module, "_whole_names", False) else f"{name}."


def _share_declared(names: Sequence[str], modules: Sequence[nn.Module], layer: int) -> None:
    for at, part in modules[layer].named_modules():
        for own, wanted in (getattr(part, "tied", None) or {}).items():
            where = f"layer {names[layer]!r} ties {at + '.' if at else ''}{own} to {wanted!r}"
            parameter = part._parameters.get(own)
            owner = _named(names, modules[:layer], wanted)
            if parameter is None or owner is None:
                raise ValueError(
                    f"{where}, and {'no layer before it holds that' if parameter is not None else 'does not hold it'}: "
                    "name a parameter of an earlier layer as in the unsplit model"
                )
            if parameter.shape != owner.shape:
                raise ValueError(f"{where}, whose shape is {list(owner.shape)} and not {list(parameter.shape)}")
            part._parameters[own] = owner


def _named(names: Sequence[str], modules: Sequence[nn.Module], wanted: str) -> nn.Parameter | None:
    for name, module in zip(names, modules, strict=False):
        for key, parameter in module.named_parameters(remove_duplicate=False):
            if prefix_of(name, module) + key == wanted:
                return parameter
    return None


def share(ties: Iterable[Tie], modules: Mapping[int, nn.Module], build: Callable[[int], nn.Module]) -> None:
    """Let the layers on this rank share the weights of `ties`, with the value that its owner begins with.

    `modules` by the number of their layer; `build` makes a layer that is not here.
    """
    for tie in ties:
        here = [(modules[layer], name) for layer, name in tie.homes if layer in modules]
        if not here:
            continue
        owner, key = tie.homes[0]
        value = _parameter(here[0][0], here[0][1])
        if owner not in modules:
            first = _parameter(build(owner), key)
            if first is not value:
                with torch.no_grad():
                    value.copy_(first)
        for module, name in here[1:]:
            at, _, own = name.rpartition(".")
            module.get_submodule(at)._parameters[own] = value


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    return module.get_parameter(name)


def stage_sets(ties: Iterable[Tie], split: Sequence[int]) -> dict[StageSet, list[Tie]]:
    """The trainable ties between stages, by the stages that share them."""
    found: dict[StageSet, list[Tie]] = {}
    for tie in ties:
        stages = sorted({max(s for s, first in enumerate(split) if first <= layer) for layer, _ in tie.homes})
        if tie.place is not None and len(stages) > 1:
            found.setdefault(tuple(stages), []).append(tie)
    return dict(sorted(found.items()))


def check_ties(sets: Mapping[StageSet, Sequence[Tie]], asynchronous: bool, schedule: str) -> None:
    """ValueError for weights that are tied between stages which update at different times."""
    if sets and asynchronous:
        stages, ties = next(iter(sets.items()))
        raise ValueError(
            f"{ties[0].name} is tied over stages {', '.join(map(str, stages))}, whose updates {schedule} makes at "
            "different times: use a synchronous schedule and replicas that wait for each other, or do not tie it"
        )
