"""Axes of given values: where each stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.report.sweep.markup import plain
from engine.report.sweep.results import number

LOGARITHMIC = 8  # numbers whose largest is so many times the smallest are spaced by their ratios
_LETTERS = 14  # of a value that are shown


@dataclass(frozen=True)
class Values:
    """Where each of an axis' values stands, between 0 and 1.

    `joined`: they are numbers, so that lines between them mean something.
    """

    values: tuple[str, ...]
    places: tuple[float, ...]
    joined: bool

    def place(self, value: str) -> float:
        """Where a value of the axis stands. Raises ValueError for another."""
        return self.places[self.values.index(value)]

    def axis(self, title: str) -> dict[str, Any]:
        """The axis as plotly's layout has it."""
        return {
            "title": {"text": plain(title)}, "range": [-0.08, 1.08], "zeroline": False, "tickvals": list(self.places),
            "ticktext": [plain(short(value, _LETTERS)) for value in self.values],
        }  # fmt: skip


def values_axis(values: Sequence[str]) -> Values:
    """Numbers at their distances, or by their ratios where those are large; anything else evenly."""
    numbers = [number(value) for value in values]
    known = [n for n in numbers if n is not None]
    if len(known) < len(values) or len(values) < 2:
        even = tuple((i + 0.5) / len(values) for i in range(len(values)))
        return Values(tuple(values), even, joined=False)
    spread = min(known) > 0 and max(known) / min(known) >= LOGARITHMIC
    at = [math.log(n) if spread else n for n in known]
    low, high = min(at), max(at)
    return Values(tuple(values), tuple((a - low) / (high - low) for a in at), joined=True)


def short(text: str, most: int) -> str:
    """The text, cut to so many letters."""
    return text if len(text) <= most else text[: most - 1] + "…"
