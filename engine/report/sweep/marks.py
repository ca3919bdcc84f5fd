"""How a job is drawn: a colour and a shape for each series, so that neither has to be told apart alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.report.pictures.palette import SERIES
from engine.report.sweep.markup import Markup, tag
from engine.report.sweep.results import Metric, Result

MOST = len(SERIES)  # series that one chart can show
NEAR = 3.5  # half of a mark


def _polygon(corners: int, turn: float, size: float) -> str:
    angles = [turn + 2 * math.pi * k / corners for k in range(corners)]
    points = " L".join(f"{size * math.sin(a):.2f} {-size * math.cos(a):.2f}" for a in angles)
    return f"M{points}Z"


_SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",  # a circle
    _polygon(4, math.pi / 4, 5),
    _polygon(3, 0, 5.6),
    _polygon(4, 0, 5.6),
    _polygon(3, math.pi, 5.6),
    _polygon(6, 0, 5),
    _polygon(5, 0, 5.2),
)


def shape(series: int, x: float, y: float, class_: str = "") -> Markup:
    """The mark of a series at a place."""
    at = f"translate({x:.1f} {y:.1f})"
    return tag("path", d=_SHAPES[series % MOST], transform=at, class_=f"mark s{series % MOST} {class_}".strip())


def job_mark(result: Result, series: int, x: float, y: float, said: str, class_: str = "") -> Markup:
    """A mark that names its job where it is pointed at, and leads to its line in the table."""
    title = tag("title", f"job {result.job}" + (f": {result.words}" if result.words else "") + f"\n{said}")
    return tag("a", title, shape(series, x, y, class_), href=f"#job{result.index}", data_job=result.index)


def said(metric: Metric, result: Result) -> str:
    return f"{metric.name} {metric.text(result.figures[metric.key])}"


def apart(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The places again, those that nearly coincide moved apart along the axis so that none hides another."""
    groups: dict[int, list[int]] = {}
    for index, (x, y) in enumerate(places):
        near = (k for k in groups if abs(places[k][0] - x) < NEAR and abs(places[k][1] - y) < NEAR)
        groups.setdefault(next(near, index), []).append(index)
    moved = list(places)
    for own in groups.values():
        for number, index in enumerate(own):
            moved[index] = (places[index][0] + 2 * NEAR * (number - (len(own) - 1) / 2), places[index][1])
    return moved


def legend(key: str, names: Sequence[str]) -> Markup:
    """The series' marks with their names; `key`: what they are values of."""
    entries = [
        tag("li", tag("svg", shape(k, 8, 8), viewBox="0 0 16 16", width=16, height=16, aria_hidden="true"), name)
        for k, name in enumerate(names)
    ]
    return tag("ul", tag("li", tag("b", key)), entries, class_="legend")
