"""The front of time against memory, and speed-up over workers with its law."""

from __future__ import annotations

from engine.report.sweep import marks
from engine.report.sweep.axes import Box, Place, frame, linear, scaled_ticks
from engine.report.sweep.markup import Markup, tag
from engine.report.sweep.panels import layout_of
from engine.report.sweep.pareto import Front
from engine.report.sweep.results import Sweep, word
from engine.report.sweep.scaling import Curve

WIDE, SMALL = (760, 380), (420, 300)  # width and height of a drawing
SAMPLES = 60  # points of a drawn law
LETTER = 7.0  # about the width of one


def _box(drawing: tuple[int, int]) -> Box:
    return Box(56, 14, drawing[0] - 20, drawing[1] - 42)


def front_chart(sweep: Sweep, found: Front, wide: bool) -> Markup:
    """All jobs; those on the front in their series' colours, joined by the line below which there is none."""
    drawing = WIDE if wide else SMALL
    box = _box(drawing)
    left, right = _padded([point[0] for point in found.points])
    low, high = _padded([point[1] for point in found.points])
    across, up = linear(left, right, box.left, box.right), linear(low, high, box.bottom, box.top)
    (time, time_unit), (memory, memory_unit) = found.time.unit(right), found.memory.unit(high)
    drawn = frame(
        box, scaled_ticks(low, high, up, memory), scaled_ticks(left, right, across, time, 8),
        "",
    )  # fmt: skip
    best = [found.points[index] for index in found.best]
    ends = [*(point[0] for point in best[1:]), right]
    steps = [f"V{up(point[1]):.1f}H{across(end):.1f}" for point, end in zip(best, ends, strict=True)]
    drawn.append(tag("path", d=f"M{across(best[0][0]):.1f} {box.top}{''.join(steps)}", class_="front"))
    key = layout_of(sweep).series
    names = sweep.varied[key] if key else [""]
    dominated, chosen, at = [], [], []
    for index, (seconds, nbytes, result) in enumerate(found.points):
        x, y = across(seconds), up(nbytes)
        series = names.index(result.settings[key]) if key and len(names) <= marks.MOST else 0
        said = f"{found.time.name} {found.time.text(seconds)}\n{found.memory.name} {found.memory.text(nbytes)}"
        if index in found.best:
            chosen.append(marks.job_mark(result, series, x, y, said))
            at.append((x, y, f"job {result.job}"[:24]))
        else:
            dominated.append(marks.job_mark(result, series, x, y, f"{said}\ndominated", "dominated"))
    said = f"{found.memory.name} over {found.time.name}, with the Pareto front"
    picture = tag(
        "svg",
        drawn,
        dominated,
        _labels(at, box),
        chosen,
        viewBox=f"0 0 {drawing[0]} {drawing[1]}",
        role="img",
        aria_label=said,
    )
    names_ = tag("b", found.memory.name), f" {memory_unit}, over ", tag("b", found.time.name), f" {time_unit}"
    shapes = [marks.legend(word(key), names)] if key and 1 < len(names) <= marks.MOST else []
    return tag("figure", tag("figcaption", names_), picture, shapes, class_="wide" if wide else None)


def _labels(places: list[tuple[float, float, str]], box: Box) -> list[Markup]:
    """Names beside their marks, each where no other stands; one that finds no room is left out."""
    taken: list[tuple[float, float, float, float]] = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in places]
    drawn = []
    for x, y, text in places:
        wide = LETTER * len(text)
        for right, base in ((True, y - 7), (True, y + 16), (False, y + 16), (False, y - 7)):
            start, side = (x + 8, "") if right else (x - 8, "end")
            left = start - (wide if side else 0)
            area = (left, base - 10, left + wide, base + 2)
            free = all(area[2] < t[0] or t[2] < area[0] or area[3] < t[1] or t[3] < area[1] for t in taken)
            if free and box.left < area[0] and area[2] < box.right + 16:
                taken.append(area)
                drawn.append(tag("text", text, x=start, y=base, class_=f"label {side}".strip()))
                break
    return drawn


def scaling_chart(curve: Curve) -> Markup:
    """Measured speed-up as marks, the law as a curve, its limit and one-for-one as lines."""
    box = _box(SMALL)
    most = max(point[0] for point in curve.points)
    end = most * 1.25
    gains = [curve.speedup(point) for point in curve.points]
    high = max(*gains, curve.fit.speedup(end), min(end, 1.4 * max(*gains, 1.0))) * 1.06
    across, up = linear(0, end, box.left, box.right), linear(0, high, box.bottom, box.top)
    sizes = sorted({point[0] for point in curve.points})
    drawn = frame(box, scaled_ticks(0, high, up, 1), [(across(size), str(size)) for size in sizes], word(curve.key))
    to = min(end, high)
    drawn.append(tag("path", d=_path([(0, 0), (to, to)], across, up), class_="ideal"))
    drawn.append(tag("text", "one for one", x=across(0.6 * to) - 8, y=up(0.6 * to) - 2, class_="tick end"))
    limit = curve.fit.limit
    if limit is not None and limit <= high:
        drawn.append(tag("path", d=_path([(0, limit), (end, limit)], across, up), class_="limit"))
        drawn.append(tag("text", f"limit {limit:.1f}", x=box.left + 6, y=up(limit) - 5, class_="tick"))
    law = [1 + (end - 1) * k / SAMPLES for k in range(SAMPLES + 1)]
    drawn.append(tag("path", d=_path([(n, curve.fit.speedup(n)) for n in law], across, up), class_="line s1"))
    drawn.append(tag("text", curve.fit.law, x=box.right, y=up(curve.fit.speedup(end)) - 7, class_="tick end"))
    points = []
    for gain, point in zip(gains, curve.points, strict=True):
        said = f"speed-up {gain:.2f}, {curve.fit.law} says {curve.fit.speedup(point[0]):.2f}"
        points.append(marks.job_mark(point[3], 0, across(point[0]), up(gain), said))
    title = f"speed-up over {word(curve.key)}"
    return tag("svg", drawn, points, viewBox=f"0 0 {SMALL[0]} {SMALL[1]}", role="img", aria_label=title)


def _path(points: list[tuple[float, float]], across: Place, up: Place) -> str:
    return "M" + " L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)


def _padded(values: list[float]) -> tuple[float, float]:
    """The interval of the values with some room; from 0 where they come near it."""
    low, high = min(values), max(values)
    room = (high - low) * 0.12 or high * 0.2 or 1.0
    start = low - room
    return (0.0 if start < 0.25 * high else start), high + room
