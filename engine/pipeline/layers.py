"""The layers of a model: an nn.Sequential taken apart, a list, or any module that is cut (`cutting`).

Each rank builds, or keeps, those of its stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.errors import a_type
from engine.pipeline.cutting.cut import beyond, cut
from engine.pipeline.cutting.recording import key_of
from engine.pipeline.dtypes import cast, in_precision
from engine.pipeline.modes import begin_training
from engine.pipeline.seeds import building

Factory = Callable[[], nn.Module]
Given = nn.Module | Sequence[nn.Module | tuple[str, nn.Module | Factory]]


class GivenLayer(NamedTuple):
    """A layer as it was given: `made`, or to be made by `factory`."""

    name: str
    made: nn.Module | None
    factory: Factory | None

    def build(self, number: int, device: torch.device, dtype: torch.dtype | None, seed: int) -> nn.Module:
        """The layer on `device`, in training mode. `factory` is seeded from (seed, number); `dtype` None: its own."""
        if self.made is not None:
            return cast(self.made, device, dtype)
        assert self.factory is not None
        with building(seed, number):
            module = self.factory()
        cast(module, device, dtype)
        begin_training(module)
        return module


def layers_of(
    given: Given,
    example: Any = None,
    split: Sequence[str] = (),
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> list[GivenLayer]:
    """The layers of an nn.Sequential, of a list of modules, or of (name, module) or (name, factory) pairs.

    Any other module is cut, for inputs like `example`, on `device` and in precision `dtype`; `split` names submodules
    at which it must be possible. Names are those of the unsplit model: a module without one is called by its position,
    as in nn.Sequential. ValueError for anything else, and for a module that cannot be cut.
    """
    if isinstance(given, nn.Sequential) and (example is None or not is_cut(given)):
        return [GivenLayer(name, child, None) for name, child in children_of(given, "layers is", "give")]
    if isinstance(given, nn.Module):
        if example is None:
            raise ValueError(
                f"layers is {a_type(given)}, which is cut by following its forward: give example=, an input as in a "
                "batch (its shapes count, not its values); or give an nn.Sequential, or a list of modules, of (name, "
                "module), or of (name, function that builds the module)"
            )
        key = key_of(pytree.tree_map(lambda leaf: _in_precision(leaf, dtype), example), training=True)
        return [GivenLayer(name, part, None) for name, part in parts_of(given, key, split, device, dtype)]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(
            f"layers is {a_type(given) if given != [] else 'an empty list'}; give a module, or a list of modules, of "
            "(name, module), or of (name, function that builds the module)"
        )
    return [_layer(number, item) for number, item in enumerate(given)]


def is_cut(given: nn.Module) -> bool:
    """Whether a module is cut by following its forward: an nn.Sequential only where it has one worth following."""
    return not isinstance(given, nn.Sequential) or bool(_beyond_children(given) and not beyond(given))


def parts_of(
    module: nn.Module, key: str, split: Sequence[str], device: torch.device | None, dtype: torch.dtype | None
) -> list[tuple[str, nn.Module]]:
    """The layers of a module that is cut for inputs like the one of `key` (`cutting.recording.key_of`)."""
    on = torch.device("cpu") if device is None else device
    return list(cut(module, key, split, lambda whole: _copied(whole, {}, on, dtype), on))


def without_data(module: nn.Module) -> nn.Module:
    """A copy of a module under FakeTensorMode."""
    return _copied(module, {})


def _in_precision(leaf: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=in_precision(leaf.dtype, dtype), device="meta")


def _layer(number: int, item: Any) -> GivenLayer:
    named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
    name, value = item if named else (str(number), item)
    if isinstance(value, nn.Module):
        return GivenLayer(name, value, None)
    if named and callable(value):
        return GivenLayer(name, None, value)
    raise ValueError(
        f"layers[{number}] is {a_type(value)}; a layer is a module, (name, module), or (name, function that builds it)"
    )


def children_of(made: nn.Sequential, where: str, remedy: str) -> list[tuple[str, nn.Module]]:
    """(name, child) of a container that only runs its children in order.

    ValueError for any other: it begins with `where`, and asks to `remedy` (give, return) a list.
    """
    if more := beyond(made) or _beyond_children(made):
        raise ValueError(
            f"{where} {a_type(made)} with {more}, which is lost where its children run on different ranks: {remedy} a "
            "list of (dotted name, function that builds the layer) instead, with that inside a layer"
        )
    if not len(made):
        raise ValueError(f"{where} {a_type(made)} without layers: add some")
    return list(made._modules.items())  # named_children() leaves out a module's second use


def _beyond_children(made: nn.Sequential) -> str:
    """What a container does besides running its children one after another, in words; empty where nothing."""
    kind = type(made)
    for name, own in (("forward", nn.Sequential), ("__iter__", nn.Sequential), ("__call__", nn.Module)):
        if getattr(kind, name) is not getattr(own, name):
            return f"a {name} of its own"
    if made._parameters or made._buffers:
        return f"tensors of its own ({', '.join([*made._parameters, *made._buffers])})"
    return ""


def fakes_of(given: Iterable[GivenLayer]) -> list[tuple[str, Factory]]:
    """(name, factory) of each layer, to be called under FakeTensorMode: modules that exist are copied without data.

    Weights that several layers share are shared by the copies too.
    """
    memo: dict[int, Any] = {}
    return [
        (name, factory if module is None else lambda module=module: _copied(module, memo))  # type: ignore[misc]
        for name, module, factory in given
    ]


def _copied(
    module: nn.Module, memo: dict[int, Any], device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """A copy without data; what shares a tensor with what is copied with the same `memo` shares its copy."""
    for tensor in _tensors(module):
        if id(tensor) not in memo:
            memo[id(tensor)] = _without_data(tensor, device or tensor.device, in_precision(tensor.dtype, dtype))
    return copy.deepcopy(module, memo)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors kept as plain attributes."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))


def _without_data(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
