"""The structure of a nesting of tensors as plain data: what a pytree is made of, with its classes as names.

    a leaf          "*"
    anything else   [class, context, [children]]: ["list", null, ["*", "*"]], ["dict", ["ids", "h"], ["*", "*"]],
                    ["mine:Output", null, ["*"]]

A job travels as plain data, so a class of the user's (a NamedTuple, or one that is registered with torch's pytree) is
named in it. It is looked up among the modules that the model itself has loaded: no name in a job makes a rank import
anything.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from engine.job import MessageSpec

LEAF = "*"
_BUILTIN: dict[str, type] = {kind.__name__: kind for kind in (list, tuple, dict, OrderedDict, defaultdict, deque)}
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, int, float, str)}
_PLAIN = (bool, int, float, str, type(None))


def form_of(value: Any) -> Any:
    """The structure of `value`. ValueError where a key or a class in it cannot be named."""
    know(value)
    kind = pytree._get_node_type(value)
    if kind not in pytree.SUPPORTED_NODES:
        return LEAF
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    of = type(value)
    if kind is namedtuple:  # noqa: PYI024  # the key under which torch keeps them all
        name, context = _name(of), None
    elif of is defaultdict:
        name, context = of.__name__, [_factory(context[0]), list(context[1])]
    else:
        name = of.__name__ if of in _BUILTIN.values() else _name(of)
    return [name, _constant(context), [form_of(child) for child in children]]


def nested(form: Any, leaves: Sequence[Any]) -> Any:
    """The nesting with this structure and these leaves, in order. ValueError where `form` is none, or does not fit."""
    left = iter(leaves)
    found = _nested(form, left)
    if next(left, LEAF) is not LEAF:
        raise ValueError(f"a structure with fewer leaves than its {len(leaves)}")
    return found


def template(spec: MessageSpec) -> Any:
    """The nesting with a TensorSpec for each tensor, and constants as they are."""
    return nested(spec.form, spec.leaves)


def _nested(form: Any, leaves: Iterator[Any]) -> Any:
    if form == LEAF:
        try:
            return next(leaves)
        except StopIteration:
            raise ValueError("a structure with more leaves than are given") from None
    if not (isinstance(form, list | tuple) and len(form) == 3 and isinstance(form[0], str)):
        raise ValueError(f"{form!r:.80} is no structure")
    name, context, children = form[0], _value(form[1]), [_nested(child, leaves) for child in form[2]]
    if name == "defaultdict":
        factory = None if context[0] is None else _FACTORIES[context[0]]
        return defaultdict(factory, zip(context[1], children, strict=True))
    if name in _BUILTIN:
        return pytree.SUPPORTED_NODES[_BUILTIN[name]].unflatten_fn(children, context)
    of = _class(name)
    if issubclass(of, tuple) and hasattr(of, "_fields"):
        return of(*children)
    if of not in pytree.SUPPORTED_NODES and dataclasses.is_dataclass(of):
        pytree.register_dataclass(of)
    if of not in pytree.SUPPORTED_NODES:
        raise ValueError(f"{name} is no structure that torch's pytree knows")
    return pytree.SUPPORTED_NODES[of].unflatten_fn(children, context)


def know(value: Any) -> None:
    """Tell torch's pytree of a dataclass of which this is an instance with tensors, so that it is taken apart."""
    of = type(value)
    unknown = dataclasses.is_dataclass(of) and of not in pytree.SUPPORTED_NODES
    if unknown and any(isinstance(field, Tensor) for field in vars(value).values()):
        pytree.register_dataclass(of)


def _name(of: type) -> str:
    if "<locals>" in of.__qualname__:
        raise ValueError(
            f"a {of.__qualname__} crosses a stage boundary, and other ranks cannot find it: define it in its module"
        )
    return f"{of.__module__}:{of.__qualname__}"


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise ValueError(
            f"a {path} of the module {module} crosses a stage boundary, and this rank has not loaded it: import it in "
            "the module that lists the model's layers"
        )
    return found


def _factory(factory: Any) -> str | None:
    if factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory:
        return factory and factory.__name__
    raise ValueError(f"a defaultdict of {factory!r} crosses a stage boundary; make it a dict")


def _constant(value: Any) -> Any:
    """A key, or what else a class keeps beside its children."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [_constant(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [_constant(item) for item in value]}
    raise ValueError(
        f"a key or field {value!r:.80} of type {type(value).__name__} crosses a stage boundary; numbers and words can"
    )


def _value(constant: Any) -> Any:
    if isinstance(constant, list | tuple):
        return [_value(item) for item in constant]
    return tuple(_value(item) for item in constant["tuple"]) if isinstance(constant, dict) else constant
