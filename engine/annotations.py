"""Find the argument of a failed call that is not of its annotated type.

`TypeError: '<' not supported between instances of 'str' and 'int'` names neither the key nor the value. Annotations do,
but they are promises that nobody keeps to the letter, so they are asked only once something has failed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

WORDS = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", NoneType: "null"}
_LISTS = (list, tuple, Sequence)


def misfit(target: Callable[..., Any], given: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first key of `given` whose value does not fit its annotation, and words for what does.

    None where all values fit.

    Without an annotation the default's type counts. `given` is plain data; what describes objects is left out.
    """
    for key, hint, default in _parameters(target):
        if key not in given or _describes_objects(given[key]) or plain(given[key]) == plain(default):
            continue
        if words(hint) and not fits(given[key], hint):
            nothing = default is inspect.Parameter.empty or default is None
            return key, words(hint) + ("" if nothing else f" (by default {plain(default)})")
    return None


def fits(value: Any, hint: Any) -> bool:
    """Return whether plain data is of an annotated type; True where that cannot be told."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(fits(value, each) for each in get_args(hint))
    if kind is Literal:
        return value in get_args(hint)
    if kind in (None, NoneType):
        return value is None
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    if kind in _LISTS:
        kinds = _items(hint) or [Any]
        return isinstance(value, list) and all(any(fits(item, each) for each in kinds) for item in value)
    with suppress(TypeError):
        return isinstance(value, kind)
    return True


def words(hint: Any) -> str:
    """Return words for the plain values of an annotation, such as "a whole number"; empty where there are none."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(filter(None, map(words, get_args(hint)))))
    if kind is Literal:
        return f"one of {', '.join(map(plain, get_args(hint)))}"
    if kind in _LISTS:
        items = {words(item) for item in _items(hint)}
        alike = len(items) == 1 and items <= _PLURAL
        return f"a list of {items.pop().removeprefix('a ')}s" if alike else "a list"
    return WORDS.get(NoneType if kind is None else kind, "")


def plain(value: Any) -> str:
    """Return a value as a user writes it in the configuration."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(plain, value))}]"
    other = {"default": lambda value: type(value).__qualname__, "skipkeys": True}
    return value if isinstance(value, str) else json.dumps(value, **other)  # type: ignore[arg-type]


_PLURAL = {WORDS[int], WORDS[float], WORDS[str]}


def _items(hint: Any) -> list[Any]:
    """Return the types that an annotated list may hold, each once."""
    return list(dict.fromkeys(each for each in get_args(hint) if each is not Ellipsis))


def _parameters(target: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, annotation (`Any` where there is none) and default of each parameter."""
    hints: dict[str, Any] = {}
    with suppress(Exception):  # annotations are user code
        hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    with suppress(TypeError, ValueError):
        for parameter in inspect.signature(target).parameters.values():
            default = parameter.default
            usual = type(default) if type(default) in (*WORDS, list) and default is not None else Any
            yield parameter.name, hints.get(parameter.name, float if usual is int else usual), default


def _describes_objects(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return (isinstance(value, Mapping) and "_target_" in value) or any(map(_describes_objects, inner))
