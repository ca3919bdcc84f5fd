"""Code that is named in tables of pure data: what a row names is imported when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

Row = TypeVar("Row")
T = TypeVar("T")


def load(name: str) -> Any:
    """Return what "package.module:attribute" names, importing the module."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Loaded(Mapping[str, T]):
    """A live view of a table: name of a row -> the object that `named(row)` names; rows without one are left out."""

    def __init__(self, table: Mapping[str, Row], named: Callable[[Row], str | None]) -> None:
        self._table: Mapping[str, Any] = table
        self._named: Callable[[Any], str | None] = named

    def __getitem__(self, name: str) -> T:
        found = self._named(self._table[name])
        if found is None:
            raise KeyError(name)
        made: T = load(found)
        return made

    def __iter__(self) -> Iterator[str]:
        return (name for name, row in self._table.items() if self._named(row) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
