"""Each figure over what was swept, side by side: lines over a number, marks over words, maps where there are many.

    along the axis    micro-batches where they were swept, else the key with the most numbers
    series            the schedule, else the key with the most values
    rows of panels    every combination of what else was swept

A figure has one scale in all rows, and the three bubbles share one.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine.report.sweep import marks
from engine.report.sweep.axes import Box, Values, frame, linear, scaled_ticks, values_axis
from engine.report.sweep.markup import Markup, tag
from engine.report.sweep.results import (
    IDEAL,
    MEASURED,
    METRICS,
    MICROBATCHES,
    PREDICTED,
    SCHEDULE,
    SEED,
    Metric,
    Result,
    Sweep,
    number,
    word,
)

BUBBLES = (IDEAL, PREDICTED, MEASURED)
MOST_ROWS = 12  # of panels
MOST_LINES = 40  # of a map
WIDE, HIGH = 340, 226
BOX = Box(52, 10, WIDE - 14, HIGH - 40)
CELL = 26  # height of a line of a map
LETTER = 6.4  # about the width of one


@dataclass(frozen=True)
class Layout:
    """Which swept key is what; `along` is None where nothing was swept. `crowded`: keys with too many values to be
    told apart on a chart."""

    along: str | None
    series: str | None = None
    rows: tuple[str, ...] = ()
    crowded: tuple[str, ...] = ()


def layout_of(sweep: Sweep) -> Layout:
    """Repetitions (seeds) are drawn on top of each other."""
    keys = [key for key in sweep.varied if key != SEED]
    if not keys:
        return Layout(None)
    numeric = [key for key in keys if all(number(value) is not None for value in sweep.varied[key])]
    along = MICROBATCHES if MICROBATCHES in keys else max(numeric or keys, key=lambda key: len(sweep.varied[key]))
    rest = [key for key in keys if key != along]
    crowded = [key for key in rest if len(sweep.varied[key]) > MOST_LINES]
    rest = [key for key in rest if key not in crowded]
    series = SCHEDULE if SCHEDULE in rest else max(rest, key=lambda key: len(sweep.varied[key]), default=None)
    return Layout(along, series, tuple(key for key in rest if key != series), tuple(crowded))


def panels(sweep: Sweep) -> list[Markup]:
    """The rows of panels, with a heading each where there are several."""
    layout = layout_of(sweep)
    if layout.along is None:
        return []
    drawn, names = [], sweep.varied[layout.series] if layout.series else []
    if len(names) > marks.MOST:
        drawn.append(
            _note(f"Over {word(layout.along)}. The stronger the colour, the more; the best of a map is framed.")
        )
    elif names:
        drawn.append(marks.legend(word(layout.series or ""), names))
    if layout.crowded:
        drawn.append(_note(f"Jobs differ in {', '.join(map(word, layout.crowded))} too, which is not told apart here."))
    rows = _rows(sweep, layout)
    kinds = [metric for metric in METRICS if sweep.known(metric)]
    for values, jobs in rows[:MOST_ROWS]:
        if values:
            said = (f"{word(key)} {value}" for key, value in zip(layout.rows, values, strict=True))
            drawn.append(tag("h3", ", ".join(said)))
        drawn.append(tag("div", [_panel(sweep, layout, metric, jobs) for metric in kinds], class_="panels"))
    if len(rows) > MOST_ROWS:
        drawn.append(_note(f"{len(rows) - MOST_ROWS} further combinations are in the table of all jobs."))
    return drawn


def _rows(sweep: Sweep, layout: Layout) -> list[tuple[tuple[str, ...], list[Result]]]:
    """The combinations that occur, in the order of their values, each with its jobs."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for result in sweep.completed:
        found.setdefault(tuple(result.settings[key] for key in layout.rows), []).append(result)
    order = {key: {value: k for k, value in enumerate(sweep.varied[key])} for key in layout.rows}
    places = {values: [order[key][v] for key, v in zip(layout.rows, values, strict=True)] for values in found}
    return sorted(found.items(), key=lambda item: places[item[0]])


def _note(text: str) -> Markup:
    return tag("p", text, class_="note")


def _panel(sweep: Sweep, layout: Layout, metric: Metric, jobs: Sequence[Result]) -> Markup:
    assert layout.along is not None
    known = [result for result in jobs if metric.key in result.figures]
    alike = BUBBLES if metric in BUBBLES else (metric,)
    all_of_it = [r.figures[m.key] for m in alike for r in sweep.known(m)]
    low, high = min(all_of_it), max(all_of_it) or 1.0
    divisor, unit = metric.unit(high) if metric not in BUBBLES else (0.01, "% of the step")
    axis = values_axis(sweep.varied[layout.along])
    names = sweep.varied[layout.series] if layout.series else [""]
    if len(names) > marks.MOST:
        inside = _map(axis, layout, names, metric, known, (low, high), divisor)
    else:
        inside = _lines(axis, layout, names, metric, known, high, divisor)
    return tag("figure", tag("figcaption", tag("b", metric.name), f" {unit}"), inside)


def _lines(
    axis: Values,
    layout: Layout,
    names: Sequence[str],
    metric: Metric,
    known: Sequence[Result],
    high: float,
    divisor: float,
) -> Markup:
    inner = Box(BOX.left + 12, BOX.top, BOX.right - 12, BOX.bottom)
    across, up = linear(0, 1, inner.left, inner.right), linear(0, high * 1.05, BOX.bottom, BOX.top)
    along = layout.along or ""
    below = _labels([(across(place), value) for value, place in zip(axis.values, axis.places, strict=True)])
    drawn = frame(BOX, scaled_ticks(0, high * 1.05, up, divisor), below, word(along))
    lines, drawn_jobs = [], []
    for series, name in enumerate(names):
        own = [r for r in known if layout.series is None or r.settings[layout.series] == name]
        places: dict[float, list[float]] = {}
        for result in own:
            x, y = across(axis.place(result.settings[along])), up(result.figures[metric.key])
            places.setdefault(x, []).append(y)
            drawn_jobs.append((result, series, x, y))
        if axis.joined and len(places) > 1 and not layout.crowded:
            path = " L".join(f"{x:.1f} {statistics.median(ys):.1f}" for x, ys in sorted(places.items()))
            lines.append(tag("path", d=f"M{path}", class_=f"line s{series}"))
    moved = marks.apart([job[2:] for job in drawn_jobs])
    points = [
        marks.job_mark(result, series, *at, marks.said(metric, result))
        for (result, series, _, _), at in zip(drawn_jobs, moved, strict=True)
    ]
    title = f"{metric.name} over {word(along)}"
    return tag("svg", drawn, lines, points, viewBox=f"0 0 {WIDE} {HIGH}", role="img", aria_label=title)


def _map(
    axis: Values,
    layout: Layout,
    names: Sequence[str],
    metric: Metric,
    known: Sequence[Result],
    ends: tuple[float, float],
    divisor: float,
) -> Markup:
    """A line per series, a cell per value, coloured by where it lies between `ends`; the best one is framed."""
    along, series = layout.along or "", layout.series or ""
    left, width = 112.0, (WIDE - 118) / len(axis.values)
    best = metric.best(known).figures[metric.key] if metric.praise and known else None
    places = [(left + (k + 0.5) * width, value) for k, value in enumerate(axis.values)]
    drawn = [tag("text", text, x=x, y=13, class_="tick middle") for x, text in _labels(places)]
    for line, name in enumerate(names):
        y = 20.0 + line * CELL
        drawn.append(tag("text", _short(name, 17), x=left - 8, y=y + 17, class_="tick end"))
        for k, value in enumerate(axis.values):
            own = [r for r in known if r.settings[series] == name and r.settings[along] == value]
            if own:
                middle = statistics.median(r.figures[metric.key] for r in own)
                shade = (middle - ends[0]) / ((ends[1] - ends[0]) or 1.0)
                framed = best is not None and any(r.figures[metric.key] == best for r in own)
                box = Box(left + k * width + 1, y + 1, left + (k + 1) * width - 1, y + CELL - 1)
                drawn.append(_cell(own[0], metric, box, middle / divisor, shade, framed))
    high = 28 + CELL * len(names)
    return tag("svg", drawn, viewBox=f"0 0 {WIDE} {high}", role="img", aria_label=f"{metric.name}, a map")


def _cell(result: Result, metric: Metric, box: Box, value: float, shade: float, framed: bool) -> Markup:
    text = f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"
    contrast = "low" if shade < 0.62 else "mid" if shade < 0.86 else "high"
    rect = tag(
        "rect", x=box.left, y=box.top, width=box.right - box.left, height=box.bottom - box.top, rx=3,
        fill_opacity=0.06 + 0.84 * shade, class_="cell best" if framed else "cell",
    )  # fmt: skip
    room = box.right - box.left > LETTER * len(text) - 4
    label = (
        None
        if not room
        else tag("text", text, x=(box.left + box.right) / 2, y=box.top + 16, class_=f"tick middle {contrast}")
    )
    title = tag("title", f"job {result.job}: {result.words}\n{marks.said(metric, result)}")
    return tag("a", title, rect, label, href=f"#job{result.index}", data_job=result.index)


def _labels(places: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Names below an axis, cut to what there is room for; left out where the one before takes the room."""
    least = min((b - a for (a, _), (b, _) in itertools.pairwise(places)), default=float(WIDE))
    most = max(4, int(max(least, 30) / LETTER))
    found: list[tuple[float, str]] = []
    for x, text in places:
        text = _short(text, most)
        if not found or x - found[-1][0] > LETTER * (len(text) + len(found[-1][1])) / 2 + 4:
            found.append((x, text))
    return found


def _short(text: str, most: int = 14) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
