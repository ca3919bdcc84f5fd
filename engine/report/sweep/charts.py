"""Charts of plotly: the front of time against memory, speed-up over workers with its law, all keys and figures at once.

A chart is data for plotly's script, which draws it in the page: it can be zoomed, its series can be hidden, and what is
pointed at is named. Colours of text and lines are the page's own and are set by its script.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.report.sweep import marks
from engine.report.sweep.axes import short
from engine.report.sweep.markup import plain, printable
from engine.report.sweep.pareto import Front
from engine.report.sweep.results import (
    COST,
    IDEAL,
    MEASURED,
    METRICS,
    PREDICTED,
    SEED,
    STEP,
    Metric,
    Result,
    Sweep,
    number,
    word,
)
from engine.report.sweep.scaling import Curve

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BUBBLES = (IDEAL, PREDICTED, MEASURED)
QUIET, LIMIT = "#8a929c", "#d55e00"
SAMPLES = 60  # points of a drawn law
NAMED = 12  # jobs on a front that have their names beside them
MOST_WORDS = 40  # values of a key that are words, on an axis


@dataclass(frozen=True)
class Chart:
    """A figure, what it is called, and its height in pixels."""

    label: str
    figure: Figure
    height: int

    def content(self) -> dict[str, Any]:
        """The figure as plain data."""
        found: dict[str, Any] = json.loads(self.figure.to_json())
        return {"label": printable(self.label), **found}


def figure(**layout: Any) -> Figure:
    """An empty figure without plotly's own looks."""
    from plotly.graph_objects import Figure

    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "top", "yref": "container"}
    usual: dict[str, Any] = {
        "template": "none", "margin": {"l": 56, "r": 16, "t": 34, "b": 44}, "hovermode": "closest", "legend": legend,
    }  # fmt: skip
    return Figure(layout=usual | layout)


def front_chart(found: Front, series: str | None, names: Sequence[str]) -> Chart:
    """All jobs; those on the front in their series' colours, joined by the line below which there is none.

    `series`: the key whose values are `names` that tells the series apart.
    """
    from plotly.graph_objects import Scatter

    most = max(seconds for seconds, _, _ in found.points)
    time, time_unit = found.time.unit(most)
    memory, memory_unit = found.memory.unit(max(nbytes for _, nbytes, _ in found.points))
    chart = figure(
        xaxis={"title": {"text": f"{found.time.name}, {time_unit}"}, "zeroline": False},
        yaxis={"title": {"text": f"{found.memory.name}, {memory_unit}"}, "zeroline": False},
    )
    best = [found.points[index] for index in found.best]
    x, y = [*(point[0] / time for point in best), most / time], [point[1] / memory for point in (*best, best[-1])]
    line = {"color": QUIET, "width": 1.5, "shape": "hv"}
    chart.add_trace(Scatter(x=x, y=y, mode="lines", line=line, name="Pareto front", hoverinfo="skip"))
    told = [name for name in names if series and len(names) <= marks.MOST] or [""]
    groups: dict[tuple[bool, int], list[tuple[Result, float, float, str]]] = {}
    for index, (seconds, nbytes, result) in enumerate(found.points):
        own = told.index(result.settings[series]) if series and len(told) > 1 else 0
        chosen = index in found.best
        said = f"{found.time.name} {found.time.text(seconds)}\n{found.memory.name} {found.memory.text(nbytes)}"
        said += "" if chosen else "\ndominated"
        groups.setdefault((chosen, own), []).append((result, seconds / time, nbytes / memory, said))
    for (chosen, own), jobs in sorted(groups.items()):
        name = told[own] or ("on the front" if chosen else "dominated")
        how: dict[str, Any] = {"legendgroup": plain(name)}
        if not chosen:
            chart.add_trace(marks.job_marks(jobs, own, name, QUIET, **how, opacity=0.5, showlegend=not told[own]))
            continue
        if len(best) <= NAMED:
            how |= {"mode": "markers+text", "textposition": "top right"}
            how |= {"text": [plain(short(f"job {result.job}", 24)) for result, *_ in jobs]}
        chart.add_trace(marks.job_marks(jobs, own, name, **how))
    return Chart(f"{found.memory.name} over {found.time.name}, with the Pareto front", chart, 400)


def scaling_chart(curve: Curve) -> Chart:
    """Measured speed-up as marks, the law as a curve, its limit and one-for-one as lines."""
    from plotly.graph_objects import Scatter

    most = max(point[0] for point in curve.points)
    end = most * 1.25
    gains = [curve.speedup(point) for point in curve.points]
    high = max(*gains, curve.fit.speedup(end), min(end, 1.4 * max(*gains, 1.0))) * 1.06
    sizes = sorted({point[0] for point in curve.points})
    chart = figure(
        xaxis={"title": {"text": plain(word(curve.key))}, "range": [0, end], "tickvals": sizes},
        yaxis={"title": {"text": "speed-up"}, "range": [0, high]},
    )

    def line(x: list[float], y: list[float], name: str, **look: Any) -> None:
        chart.add_trace(Scatter(x=x, y=y, mode="lines", name=name, line=look, hoverinfo="name+y"))

    to = min(end, high)
    line([0, to], [0, to], "one for one", color=QUIET, dash="dot")
    limit = curve.fit.limit
    if limit is not None and limit <= high:
        line([0, end], [limit, limit], f"limit {limit:.1f}", color=LIMIT, dash="dash")
    law = [1 + (end - 1) * k / SAMPLES for k in range(SAMPLES + 1)]
    line(law, [curve.fit.speedup(n) for n in law], curve.fit.law, color=QUIET)
    points = []
    for gain, point in zip(gains, curve.points, strict=True):
        said = f"speed-up {gain:.2f}, {curve.fit.law} says {curve.fit.speedup(point[0]):.2f}"
        points.append((point[3], float(point[0]), gain, said))
    chart.add_trace(marks.job_marks(points, 0, "measured"))
    return Chart(f"speed-up over {word(curve.key)}", chart, 340)


def parallel_chart(sweep: Sweep) -> Chart | None:
    """Every job as a line across an axis for each key that was swept and each figure; None where that says nothing."""
    from plotly.graph_objects import Parcoords

    keys = [key for key in sweep.varied if key != SEED and _axis_of(sweep.varied[key]) is not None]
    colour = STEP if sweep.known(STEP) else COST
    metrics = [metric for metric in METRICS if len(sweep.known(metric)) == len(sweep.known(colour)) > 1]
    jobs = sweep.known(colour)
    if not keys or not metrics:
        return None
    dimensions: list[dict[str, Any]] = []
    for key in keys:
        axis, places = _axis_of(sweep.varied[key]) or ({}, {})
        dimensions.append({"label": plain(word(key)), "values": [places[job.settings[key]] for job in jobs]} | axis)
    for metric in metrics:
        values, unit = _in_units(metric, jobs)
        dimensions.append({"label": f"{metric.name}, {unit}", "values": values})
    values, unit = _in_units(colour, jobs)
    look = {"color": values, "colorscale": "Viridis", "showscale": True}
    look["colorbar"] = {"title": {"text": f"{colour.name}, {unit}", "side": "right"}, "thickness": 12}
    chart = figure(margin={"l": 80, "r": 40, "t": 60, "b": 24})
    chart.add_trace(Parcoords(dimensions=dimensions, line=look, labelangle=-12, labelside="top"))
    return Chart("all keys and figures, a line per job", chart, 380)


def _axis_of(values: Sequence[str]) -> tuple[dict[str, Any], dict[str, float]] | None:
    """How an axis of these values looks, and where each of them is on it; None for too many words."""
    numbers = {value: found for value in values if (found := number(value)) is not None}
    if len(numbers) == len(values):
        return ({"tickvals": list(numbers.values())} if len(numbers) <= 8 else {}), numbers
    if len(values) > MOST_WORDS:
        return None
    places = {value: float(place) for place, value in enumerate(values)}
    return {"tickvals": list(places.values()), "ticktext": [printable(short(value, 20)) for value in values]}, places


def unit_of(metric: Metric, largest: float) -> tuple[float, str]:
    """What figures are divided by on an axis, and its unit; bubbles are percentages."""
    return (0.01, "% of the step") if metric in BUBBLES else metric.unit(largest)


def _in_units(metric: Metric, jobs: Sequence[Result]) -> tuple[list[float], str]:
    figures = [job.figures[metric.key] for job in jobs]
    divisor, unit = unit_of(metric, max(figures))
    return [value / divisor for value in figures], unit
