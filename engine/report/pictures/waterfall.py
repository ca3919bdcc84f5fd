"""The waterfall as a picture: a bar per cause, each beginning where the one above it ended."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from engine.categories import WATERFALL
from engine.report.pictures.figure import Picture, defaults, points
from engine.report.pictures.palette import INK, QUIET
from engine.report.pictures.timeline import MARGIN, SMALL

_ROW, _NAMES, _FIGURES = 30, 120, 150
_COLOURS = {bar.name: bar.colour for bar in WATERFALL}


@defaults()
def draw_bars(bars: Mapping[str, float], title: str, width: int = SMALL) -> Picture:
    """Draw the bars of a waterfall below each other, and their sum as the last.

    `bars`: seconds by name, in order. A negative one goes to the left.
    """
    ends = list(itertools.accumulate(bars.values(), initial=0.0))
    total = ends[-1]
    picture = Picture(width, 2 * MARGIN + _ROW * (len(bars) + 2))
    picture.text(MARGIN, MARGIN + _ROW / 2, title, 16, INK)
    left, right = MARGIN + _NAMES, width - MARGIN - _FIGURES
    axes = picture.axes(left, MARGIN + _ROW, right, picture.height - MARGIN)
    rows, low, high = len(bars) + 1, min(ends), max(ends)
    axes.set_xlim(low, high if high > low else low + 1)
    axes.set_ylim(rows, 0)
    for row, name in enumerate([*bars, "measured"]):
        picture.text(left - 10, MARGIN + _ROW * (row + 1.5), name, 13, INK, "right")
    starts, lengths = [*ends[:-1], 0.0], [*bars.values(), total]
    colours = [*(_COLOURS.get(name, QUIET) for name in bars), QUIET]
    axes.barh([row + 0.5 for row in range(rows)], lengths, 0.6, starts, color=colours, antialiased=False)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        end = max(start, start + length)
        axes.annotate(
            _figure(length, total), (end, row + 0.5), (points(8), 0), textcoords="offset points", fontsize=points(13),
            color=INK, va="center_baseline", annotation_clip=False,
        )  # fmt: skip
    for row, end in enumerate(ends[1:-1], 1):  # from the end of one bar to the beginning of the next
        axes.plot([end, end], [row - 0.2, row + 0.2], color=QUIET, linewidth=points(1))
    return picture


def _figure(seconds: float, total: float) -> str:
    share = f"  {100 * seconds / total:.1f} %" if total else ""
    return f"{seconds * 1e3:.2f} ms{share}"
