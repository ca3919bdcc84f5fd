"""How a job is drawn: a colour and a shape for each series, so that neither has to be told apart alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.report.pictures.palette import SERIES
from engine.report.sweep.markup import plain
from engine.report.sweep.results import Metric, Result

if TYPE_CHECKING:
    from plotly.graph_objects import Scatter

MOST = len(SERIES)  # series that one chart can show
NEAR = 0.02  # of an axis: marks that are closer hide each other
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "hexagon", "pentagon")


def job_text(result: Result, said: str) -> str:
    """What is shown where a job is pointed at: which one it is, what was swept of it, and a figure."""
    name = f"job {result.job}" + (f": {result.words}" if result.words else "")
    return "<br>".join(plain(line) for line in (name, *said.splitlines()))


def said(metric: Metric, result: Result) -> str:
    """A job's figure in words."""
    return f"{metric.name} {metric.text(result.figures[metric.key])}"


def job_marks(
    jobs: Sequence[tuple[Result, float, float, str]], series: int, name: str, colour: str | None = None, **more: Any
) -> Scatter:
    """Marks of one series: (job, x, y, what is said of it). Each knows its job's number, for the page's script."""
    from plotly.graph_objects import Scatter

    marker = {"color": colour or SERIES[series % MOST], "symbol": _SHAPES[series % MOST], "size": 9}
    how: dict[str, Any] = {"mode": "markers", "name": plain(name), "marker": marker, "hoverinfo": "text"} | more
    return Scatter(
        x=[x for _, x, _, _ in jobs],
        y=[y for _, _, y, _ in jobs],
        hovertext=[job_text(result, text) for result, _, _, text in jobs],
        customdata=[result.index for result, _, _, _ in jobs],
        **how,
    )


def apart(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The places, as shares of the axes, those that nearly coincide moved apart along x so that none hides another."""
    groups: dict[int, list[int]] = {}
    for index, (x, y) in enumerate(places):
        near = (k for k in groups if abs(places[k][0] - x) < NEAR and abs(places[k][1] - y) < NEAR)
        groups.setdefault(next(near, index), []).append(index)
    moved = list(places)
    for own in groups.values():
        for number, index in enumerate(own):
            moved[index] = (places[index][0] + 2 * NEAR * (number - (len(own) - 1) / 2), places[index][1])
    return moved
