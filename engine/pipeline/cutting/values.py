"""Nestings in which tensors are replaced by where they come from, so that a call can be repeated with others."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.pipeline.messages.nesting import know

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type, enum.Enum,
    torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size,
)  # fmt: skip


class Ref(NamedTuple):
    """A tensor that the forward has made, or was given."""

    number: int


class Own(NamedTuple):
    """A parameter, a buffer, or a tensor kept as an attribute: its dotted name in the unsplit module."""

    name: str


class Odd(NamedTuple):
    """Something else than tensors and constants."""

    value: Any


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The nesting with `leaf` of everything that is no container in it. Slices are containers here."""
    if isinstance(value, Ref | Own):
        return leaf(value)
    of = type(value)
    if of is tuple or of is list:
        return of(mapped(item, leaf) for item in value)
    if of is dict:
        return {key: mapped(item, leaf) for key, item in value.items()}
    if of is slice:
        return slice(mapped(value.start, leaf), mapped(value.stop, leaf), mapped(value.step, leaf))
    know(value)
    if isinstance(value, Tensor) or pytree._get_node_type(value) not in pytree.SUPPORTED_NODES:
        return leaf(value)
    return pytree.tree_map(leaf, value, is_leaf=lambda item: isinstance(item, Ref | Own))


def leaves(value: Any) -> Iterator[Any]:
    """What `mapped` calls its function for."""
    found: list[Any] = []
    mapped(value, found.append)
    return iter(found)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nesting."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def odd_in(value: Any) -> Any:
    """The first `Odd` thing of a nesting, or None: it may hold tensors that cannot be seen."""
    for leaf in leaves(value):
        if not isinstance(leaf, (Tensor, nn.Module, *PLAIN)) and not callable(leaf):
            return Odd(leaf)
    return None


def signature_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a forward, where it has one."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def call_of(signature: inspect.Signature | None, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a forward is called with an input: a dictionary by keywords, a tuple or list by position, if it takes that.

    Anything else, and what it does not take so, is its one argument.
    """
    if signature is None:
        return (value,), {}
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        ways.append(((), dict(value)))
    if isinstance(value, tuple | list):
        ways.append((tuple(value), {}))
    for args, kwargs in ways:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return args, kwargs
    return (value,), {}
