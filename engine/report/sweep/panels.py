"""Each figure over what was swept, side by side: lines over a number, marks over words, maps where there are many.

    along the axis    micro-batches where they were swept, else the key with the most numbers
    series            the schedule, else the key with the most values
    a chart for each  combination of what else was swept, with a panel for each figure

A figure has one scale in all charts, and the three bubbles share one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.report.pictures.palette import SERIES
from engine.report.sweep import marks
from engine.report.sweep.axes import short, values_axis
from engine.report.sweep.charts import BUBBLES, Chart, figure, unit_of
from engine.report.sweep.markup import Markup, plain, tag
from engine.report.sweep.results import (
    METRICS,
    MICROBATCHES,
    SCHEDULE,
    SEED,
    Metric,
    Result,
    Sweep,
    number,
    word,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MOST_CHARTS = 12
MOST_LINES = 40  # of a map
COLUMNS = 3  # panels beside each other
HIGH, LINE = 210, 22  # pixels of a panel with lines, and of a line of a map
_MAP = [[0, "rgba(0,114,178,0.06)"], [1, "rgba(0,114,178,0.9)"]]


@dataclass(frozen=True)
class PanelLayout:
    """Which swept key is what; `along` is None where nothing was swept.

    `crowded`: keys with too many values to be told apart on a chart.
    """

    along: str | None
    series: str | None = None
    rows: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()


def layout_of(sweep: Sweep) -> PanelLayout:
    """The layout of a sweep's panels. Repetitions (seeds) are drawn on top of each other."""
    keys = [key for key in sweep.varied if key != SEED]
    if not keys:
        return PanelLayout(None)
    numeric = [key for key in keys if all(number(value) is not None for value in sweep.varied[key])]
    along = MICROBATCHES if MICROBATCHES in keys else max(numeric or keys, key=lambda key: len(sweep.varied[key]))
    rest = [key for key in keys if key != along]
    crowded = [key for key in rest if len(sweep.varied[key]) > MOST_LINES]
    rest = [key for key in rest if key not in crowded]
    series = SCHEDULE if SCHEDULE in rest else max(rest, key=lambda key: len(sweep.varied[key]), default=None)
    return PanelLayout(along, series, tuple(key for key in rest if key != series), tuple(crowded))


def panels(sweep: Sweep) -> list[Markup | Chart]:
    """The charts, with a heading each where there are several."""
    layout = layout_of(sweep)
    if layout.along is None or not any(sweep.known(metric) for metric in METRICS):
        return []  # nothing was varied, or nothing is known of any job
    drawn: list[Markup | Chart] = []
    if layout.series and len(sweep.varied[layout.series]) > marks.MOST:
        drawn.append(
            _note(f"Over {word(layout.along)}. The stronger the colour, the more; the best of a map has a star.")
        )
    if layout.crowded:
        drawn.append(_note(f"Jobs differ in {', '.join(map(word, layout.crowded))} too, which is not told apart here."))
    combinations = _combinations(sweep, layout)
    for values, jobs in combinations[:MOST_CHARTS]:
        heading = ", ".join(f"{word(key)} {value}" for key, value in zip(layout.rows, values, strict=True))
        if heading:
            drawn.append(tag("h3", heading))
        drawn.append(_Panels(sweep, layout, jobs).chart(heading))
    if len(combinations) > MOST_CHARTS:
        drawn.append(_note(f"{len(combinations) - MOST_CHARTS} further combinations are in the table of all jobs."))
    return drawn


def _combinations(sweep: Sweep, layout: PanelLayout) -> list[tuple[tuple[str, ...], list[Result]]]:
    """The combinations that occur, in the order of their values, each with its jobs."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for result in sweep.completed:
        found.setdefault(tuple(result.settings[key] for key in layout.rows), []).append(result)
    order = {key: {value: k for k, value in enumerate(sweep.varied[key])} for key in layout.rows}
    places = {values: [order[key][v] for key, v in zip(layout.rows, values, strict=True)] for values in found}
    return sorted(found.items(), key=lambda item: places[item[0]])


def _note(text: str) -> Markup:
    return tag("p", text, class_="note")


class _Panels:
    """The panels of some jobs, one per figure."""

    def __init__(self, sweep: Sweep, layout: PanelLayout, jobs: Sequence[Result]) -> None:
        assert layout.along is not None
        self.sweep, self.layout, self.along, self.jobs = sweep, layout, layout.along, jobs
        self.metrics = [metric for metric in METRICS if sweep.known(metric)]
        self.axis = values_axis(sweep.varied[self.along])
        self.names = sweep.varied[layout.series] if layout.series else [""]
        self.maps = len(self.names) > marks.MOST

    def chart(self, heading: str) -> Chart:
        from plotly.subplots import make_subplots

        columns = 2 if self.maps else COLUMNS
        rows = -(-len(self.metrics) // columns)
        each = 60 + LINE * len(self.names) if self.maps else HIGH
        height = 70 + rows * (each + 64)
        scales = [self._scale(metric) for metric in self.metrics]
        titles = [f"<b>{metric.name}</b> {unit}" for metric, (_, _, unit) in zip(self.metrics, scales, strict=True)]
        left = 130 if self.maps else 44
        drawn: Figure = make_subplots(
            rows, columns, subplot_titles=titles, figure=figure(margin={"l": left, "r": 12, "t": 60, "b": 44}),
            vertical_spacing=64 / max(1, height - 104), horizontal_spacing=0.16 if self.maps else 0.06,
        )  # fmt: skip
        drawn.update_annotations(font={"size": 13})
        for place, (metric, scale) in enumerate(zip(self.metrics, scales, strict=True)):
            at = {"row": place // columns + 1, "col": place % columns + 1}
            known = [result for result in self.jobs if metric.key in result.figures]
            (self._map if self.maps else self._lines)(drawn, at, metric, known, scale)
        name = "maps" if self.maps else "figures"
        return Chart(f"{name} over {word(self.along)}" + (f", {heading}" if heading else ""), drawn, height)

    def _scale(self, metric: Metric) -> tuple[float, float, str]:
        """The largest figure of all jobs in the unit of the axis, that unit, and its name."""
        alike = BUBBLES if metric in BUBBLES else (metric,)
        high = max(r.figures[m.key] for m in alike for r in self.sweep.known(m)) or 1.0
        divisor, unit = unit_of(metric, high)
        return high / divisor, divisor, unit

    def _lines(
        self, drawn: Figure, at: dict[str, int], metric: Metric, known: Sequence[Result],
        scale: tuple[float, float, str],
    ) -> None:  # fmt: skip
        from plotly.graph_objects import Scatter

        high, divisor, _ = scale
        drawn.update_xaxes(self.axis.axis(word(self.along)), **at)
        drawn.update_yaxes({"range": [0, 1.05 * high]}, **at)
        series = [self.names.index(r.settings[self.layout.series]) if self.layout.series else 0 for r in known]
        places = [(self.axis.place(r.settings[self.along]), r.figures[metric.key] / divisor) for r in known]
        moved = marks.apart([(x, y / high) for x, y in places])
        for own, name in enumerate(self.names):
            here = [k for k, index in enumerate(series) if index == own]
            group = {"legendgroup": plain(name), "meta": metric.name}
            if self.axis.joined and not self.layout.crowded and len({places[k][0] for k in here}) > 1:
                found: dict[float, list[float]] = {}
                for k in here:
                    found.setdefault(places[k][0], []).append(places[k][1])
                x, y = zip(*((x, statistics.median(ys)) for x, ys in sorted(found.items())), strict=True)
                look = {"color": SERIES[own % marks.MOST], "width": 2}
                line = Scatter(x=x, y=y, mode="lines", line=look, hoverinfo="skip", showlegend=False, **group)
                drawn.add_trace(line, **at)
            jobs = [(known[k], moved[k][0], places[k][1], marks.said(metric, known[k])) for k in here]
            shown = metric is self.metrics[0] and len(self.names) > 1
            drawn.add_trace(marks.job_marks(jobs, own, name, showlegend=shown, **group), **at)

    def _map(
        self, drawn: Figure, at: dict[str, int], metric: Metric, known: Sequence[Result],
        scale: tuple[float, float, str],
    ) -> None:  # fmt: skip
        """A line per series, a cell per value, coloured by where it lies among all jobs; the best one has a star."""
        from plotly.graph_objects import Heatmap

        high, divisor, _ = scale
        series, values = self.layout.series or "", self.axis.values
        best = metric.best(known).figures[metric.key] if metric.praise and known else None
        shape = [[None] * len(values) for _ in self.names]
        z: list[list[Any]] = [list(row) for row in shape]
        jobs: list[list[Any]] = [list(row) for row in shape]
        text, told = ([[""] * len(values) for _ in self.names] for _ in range(2))
        for line, name in enumerate(self.names):
            for k, value in enumerate(values):
                own = [r for r in known if r.settings[series] == name and r.settings[self.along] == value]
                if own:
                    z[line][k] = middle = statistics.median(r.figures[metric.key] for r in own) / divisor
                    framed = best is not None and any(r.figures[metric.key] == best for r in own)
                    text[line][k] = (f"{middle:.1f}" if abs(middle) < 100 else f"{middle:,.0f}") + " ★" * framed
                    told[line][k] = marks.job_text(own[0], marks.said(metric, own[0]))
                    jobs[line][k] = own[0].index
        low = min(r.figures[metric.key] for r in self.sweep.known(metric)) / divisor
        drawn.add_trace(
            Heatmap(
                z=z, text=text, texttemplate="%{text}", hovertext=told, hoverinfo="text", customdata=jobs, zmin=low,
                zmax=max(high, low), colorscale=_MAP, showscale=False, xgap=2, ygap=2, meta=metric.name,
            ),
            **at,
        )  # fmt: skip
        labels = [plain(short(value, 14)) for value in values]
        drawn.update_xaxes({"tickvals": list(range(len(values))), "ticktext": labels, "showgrid": False}, **at)
        names = [plain(short(name, 17)) for name in self.names]
        drawn.update_yaxes(
            {"tickvals": list(range(len(names))), "ticktext": names, "autorange": "reversed", "showgrid": False}, **at
        )
