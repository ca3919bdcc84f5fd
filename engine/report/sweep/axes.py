"""From figures to places on a chart: scales, ticks, the frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.report.sweep.markup import Markup, tag
from engine.report.sweep.results import number

LOGARITHMIC = 8  # numbers whose largest is so many times the smallest are spaced by their ratios


@dataclass(frozen=True)
class Box:
    """The area within the axes, in the units of the drawing; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float


Place = Callable[[float], float]


def linear(low: float, high: float, start: float, end: float) -> Place:
    """low -> start, high -> end."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from the interval, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, step: float) -> str:
    """With as many decimals as tell neighbours apart."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{decimals}f}"


@dataclass(frozen=True)
class Values:
    """An axis of given values: where each stands, between 0 and 1. `joined`: they are numbers, so that lines between
    them mean something."""

    values: tuple[str, ...]
    places: tuple[float, ...]
    joined: bool

    def place(self, value: str) -> float:
        return self.places[self.values.index(value)]


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


def frame(
    box: Box, marks: Sequence[tuple[float, str]], bottom: Sequence[tuple[float, str]], label: str
) -> list[Markup]:
    """Grid lines with their numbers at the left (`marks`: y, text), names below (`bottom`: x, text), the axis' name."""
    drawn = []
    for y, text in marks:
        drawn.append(tag("line", x1=box.left, x2=box.right, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", text, x=box.left - 6, y=y + 4, class_="tick end"))
    for x, text in bottom:
        drawn.append(tag("line", x1=x, x2=x, y1=box.bottom, y2=box.bottom + 4, class_="grid"))
        drawn.append(tag("text", text, x=x, y=box.bottom + 17, class_="tick middle"))
    drawn.append(tag("line", x1=box.left, x2=box.right, y1=box.bottom, y2=box.bottom, class_="axis"))
    drawn.append(tag("text", label, x=box.right, y=box.bottom + 32, class_="tick end"))
    return drawn


def scaled_ticks(low: float, high: float, place: Place, divisor: float, about: int = 5) -> list[tuple[float, str]]:
    """(place, text) of round numbers of `divisor`s between low and high."""
    found = ticks(low / divisor, high / divisor, about)
    step = found[1] - found[0] if len(found) > 1 else abs(found[0]) or 1.0
    return [(place(value * divisor), tick_text(value, step)) for value in found]
