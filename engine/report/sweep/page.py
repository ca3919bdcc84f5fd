"""The page of a sweep: one file that needs no other and no network.

Charts are plotly's: its script lies in the page, which is about 5 MB for that reason. Our own script sorts the table
and shows a job everywhere where it is pointed at; the tables can be read without either. What came from users
(overrides, errors, names) is text wherever it stands: see `markup`. The page forbids itself to load anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.report.pictures.palette import style
from engine.report.sweep.charts import Chart, front_chart, parallel_chart, scaling_chart
from engine.report.sweep.markup import Child, Markup, tag
from engine.report.sweep.panels import layout_of, panels
from engine.report.sweep.pareto import Front, fronts
from engine.report.sweep.results import (
    BATCH,
    MEASURED,
    METRICS,
    PREDICTED,
    SCHEDULE,
    STEP,
    UNKNOWN,
    Metric,
    Result,
    Sweep,
    word,
)
from engine.report.sweep.scaling import curves, scaling_rows
from engine.report.sweep.ways import NOTE, way_rows

_HERE = Path(__file__).parent
# plotly draws lines across parallel axes by functions that it makes of text, and saves pictures by way of blobs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data: blob:"
MOST_CURVES = 12  # that are drawn
MOST_VALUES = 16  # of a key, that are listed at the head
_HOW = (
    "Point at a mark for its job; a click leads to its line in the table. Drag to zoom in, double-click for the whole; "
    "a click on a name in the legend hides it."
)
_PARALLEL = "Each line is a job. Drag along an axis to keep the lines that cross there; drag its name to move it."
_LEFT = frozenset({"way", "job", "status", "schedule"})  # columns of words


def page(sweep: Sweep, name: str) -> str:
    """The whole page as HTML; `name` of the sweep."""
    charts = _Charts()
    lines = parallel_chart(sweep)
    sections = [
        _about(sweep, name),
        _troubles(sweep),
        _section("Figures", [charts.placed(part) for part in panels(sweep)], _HOW),
        _fronts(sweep, charts),
        _section("All at once", [charts.placed(lines)] if lines else [], _PARALLEL),
        _scaling(sweep, charts),
        _ways(sweep),
        _section("All jobs", [_jobs(sweep)]),
    ]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"Sweep {name}"),
        tag("style", Markup(_colours() + (_HERE / "page.css").read_text())),
    ]
    scripts = charts.scripts() if charts.contents else None
    own = tag("script", Markup((_HERE / "page.js").read_text()))
    whole = tag("html", tag("head", head), tag("body", tag("main", sections), scripts, own), lang="en")
    return f"<!doctype html>\n{whole}\n"


class _Charts:
    """The charts of a page: places for them, and what its script draws there."""

    def __init__(self) -> None:
        self.contents: list[dict[str, Any]] = []

    def placed(self, part: Chart | Markup) -> Markup:
        """A chart's place in the page; what is no chart stays as it is."""
        if isinstance(part, Markup):
            return part
        self.contents.append(part.content())
        number, look = len(self.contents) - 1, f"height:{part.height}px"
        return tag("div", class_="chart", role="img", aria_label=part.label, data_chart=number, style=look)

    def scripts(self) -> list[Markup]:
        """The charts as data, and plotly."""
        from plotly.offline import get_plotlyjs

        content = json.dumps(self.contents, separators=(",", ":")).replace("<", "\\u003c")  # no text ends the element
        return [
            tag("script", Markup(content), type="application/json", id="charts"),
            tag("script", Markup(get_plotlyjs())),
        ]


def _colours() -> str:
    """Those of the theme that the reader's system has."""
    return f"{style('light')}@media (prefers-color-scheme: dark) {{\n{style('dark')}}}\n"


def _section(title: str, content: list[Markup], note: Child = None) -> Markup | None:
    """A part of the page, left out where it is empty."""
    if not content:
        return None
    return tag("section", tag("h2", title), tag("p", note, class_="note") if note else None, content)


# -- the head of the page ----------------------------------------------------------------------------------------------


def _about(sweep: Sweep, name: str) -> Markup:
    counts: dict[str, int] = {}
    for result in sweep.results:
        counts[result.status] = counts.get(result.status, 0) + 1
    jobs = len(sweep.results)
    said = f"{jobs} job{'s' * (jobs != 1)}" + (
        ": " + ", ".join(f"{count} {status}" for status, count in counts.items()) if counts else ""
    )
    swept = [
        tag("li", tag("b", word(key)), " ", ", ".join(values[:MOST_VALUES]) + ", …" * (len(values) > MOST_VALUES))
        for key, own in sweep.swept.items()
        if (values := [value for value in own if value != UNKNOWN])
    ]
    shared = tag("p", "In all jobs: ", tag("code", "  ".join(sweep.shared)), class_="note") if sweep.shared else None
    return tag(
        "header", tag("h1", "Sweep ", tag("span", name)), tag("p", said),
        tag("ul", swept, class_="swept") if swept else None, shared, tag("div", _best(sweep), class_="cards"),
    )  # fmt: skip


def _best(sweep: Sweep) -> list[Markup]:
    """The best job by each figure that has a best."""
    cards = []
    comparable = len({result.number(BATCH) for result in sweep.known(STEP)}) == 1
    measured = bool(sweep.known(MEASURED))
    for metric in METRICS:
        known = sweep.known(metric)
        if metric.praise is None or len(known) < 2:
            continue
        if (metric is STEP and not comparable) or (metric is PREDICTED and measured):
            continue
        best = metric.best(known)
        cards.append(
            tag(
                "a",
                tag("small", f"{metric.praise} {metric.name}"),
                tag("strong", metric.text(best.figures[metric.key])),
                tag("span", f"job {best.job}" + (f": {best.words}" if best.words else "")),
                href=f"#job{best.index}",
                data_job=best.index,
            )
        )
    return cards


def _troubles(sweep: Sweep) -> Markup | None:
    """Jobs that did not complete, with their reason."""
    lines = [
        tag("li", tag("b", f"job {r.job} {r.status}"), f" ({r.words})" if r.words else "", ": ",
            r.reason or "no reason was left", id=f"why{r.index}")
        for r in sweep.results if not r.completed
    ]  # fmt: skip
    return tag("section", tag("h2", "Not completed"), tag("ul", lines), class_="troubles") if lines else None


# -- its parts ---------------------------------------------------------------------------------------------------------


def _fronts(sweep: Sweep, charts: _Charts) -> Markup | None:
    found = fronts(sweep)
    note = "The Pareto front: of these jobs no other is better in one and as good in the other. The dominated are grey."
    if any(each.time.key == "per sample" for each in found):
        note += " Jobs differ in their global batch, so this is the time per sample."
    if len(found) == 1:
        return _section(found[0].title.capitalize(), _front(sweep, found[0], charts), note)
    parts = [tag("article", tag("h3", each.among or each.title), _front(sweep, each, charts)) for each in found]
    return _section("Time against memory", [tag("div", parts, class_="curves")] if parts else [], note)


def _front(sweep: Sweep, found: Front, charts: _Charts) -> list[Markup]:
    time, memory = found.time, found.memory
    rows = [["job", *map(word, sweep.swept), time.name, memory.name, "slower than the fastest", "of its memory"]]
    fastest = found.points[found.best[0]]
    for seconds, kept, result in (found.points[index] for index in found.best):
        slower = f"+{100 * (seconds / fastest[0] - 1):.1f} %" if fastest[0] else "-"
        share = f"{100 * kept / fastest[1]:.0f} %" if fastest[1] else "-"
        rows.append([result.job, *result.settings.values(), time.text(seconds), memory.text(kept), slower, share])
    series = layout_of(sweep).series
    return [charts.placed(front_chart(found, series, sweep.varied[series] if series else [])), _table(rows)]


def _scaling(sweep: Sweep, charts: _Charts) -> Markup | None:
    found, refused = curves(sweep)
    parts = [
        tag(
            "article",
            tag("h3", f"Over {word(curve.key)}" + (f": {curve.common}" if curve.common else "")),
            tag("p", curve.sentence),
            charts.placed(scaling_chart(curve)),
            _table(scaling_rows(curve)),
        )
        for curve in found[:MOST_CURVES]
    ]
    if len(found) > MOST_CURVES:
        refused.append(f"{len(found) - MOST_CURVES} further curves are in comparison.txt.")
    drawn = [tag("div", parts, class_="curves")] if parts else []
    return _section("Scaling", drawn + [tag("p", text, class_="note") for text in refused])


def _ways(sweep: Sweep) -> Markup | None:
    rows = way_rows(sweep)
    return _section("Plain, data-parallel, model-parallel", [_table(rows)] if rows else [], NOTE)


def _table(rows: list[list[str]]) -> Markup:
    head, *body = rows
    left = [name in _LEFT for name in head]

    def cells(kind: str, row: list[str]) -> list[Markup]:
        return [tag(kind, text, class_="left" if word_ else None) for text, word_ in zip(row, left, strict=True)]

    lines = [tag("tr", cells("td", row)) for row in body]
    return tag("div", tag("table", tag("thead", tag("tr", cells("th", head))), tag("tbody", lines)), class_="scroll")


def _jobs(sweep: Sweep) -> Markup:
    metrics = [metric for metric in METRICS if any(metric.key in r.figures for r in sweep.results)]
    keys = list(sweep.swept)
    head = ["job", *map(word, keys), *(metric.name for metric in metrics), "loss", "status"]
    on_front = {found.points[index][2].index for found in fronts(sweep) for index in found.best}
    lines = [_job(result, keys, metrics, result.index in on_front) for result in sweep.results]
    cells = [tag("th", text, scope="col", class_="left" if text in _LEFT else None) for text in head]
    note = tag("p", "★ lies on the Pareto front. A click on a head sorts.", class_="note")
    table = tag("table", tag("thead", tag("tr", cells)), tag("tbody", lines), class_="sortable")
    return tag("div", note, tag("div", table, class_="scroll"))


def _job(result: Result, keys: list[str], metrics: list[Metric], best: bool) -> Markup:
    loss = (result.row.get("loss") or {}).get("last")
    name: Child = result.job
    if result.row.get("step_time"):  # it has a report
        name = tag("a", result.job, href=f"./{quote(result.job)}/report.txt")
    cells = [tag("td", name, " ★" if best else None, class_="left", data_value=result.index)]
    cells += [tag("td", result.settings[key], class_="left" if key == SCHEDULE else None) for key in keys]
    for metric in metrics:
        value = result.figures.get(metric.key)
        text = "-" if value is None else metric.text(value)
        cells.append(tag("td", text, data_value="" if value is None else repr(value)))
    cells.append(tag("td", "-" if loss is None else f"{loss:.4g}", data_value="" if loss is None else repr(loss)))
    status = result.status if result.completed else tag("a", result.status, href=f"#why{result.index}")
    cells.append(tag("td", status, class_="left"))
    classes = "completed" if result.completed else "trouble"
    return tag("tr", cells, id=f"job{result.index}", data_job=result.index, class_=classes)
