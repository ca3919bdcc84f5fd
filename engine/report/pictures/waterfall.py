"""The waterfall as a picture: a bar per cause, each beginning where the one above it ended."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from engine.categories import WATERFALL
from engine.report.pictures.figure import Picture, defaults
from engine.report.pictures.palette import INK, QUIET
from engine.report.pictures.timeline import MARGIN, SMALL

_ROW, _NAMES, _FIGURES = 30, 120, 150
SECONDS = 10.0  # seconds of a step: from here on figures are in seconds, so that they have room
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
    low, high = min(ends), max(ends)
    starts, stops = np.array([*ends[:-1], 0.0]), np.array([*ends[1:], total])
    to, since = (left + (t - low) / (high - low or 1) * (right - left) for t in (stops, starts))
    middle = MARGIN + _ROW * (np.arange(len(starts)) + 1.5)
    colours = [*(_COLOURS.get(name, QUIET) for name in bars), QUIET]
    picture.boxes(np.minimum(since, to), middle - 0.3 * _ROW, np.maximum(since, to), middle + 0.3 * _ROW, colours)
    joints = to[:-2]  # from the end of one bar to the beginning of the next
    picture.boxes(joints, middle[:-2] + 0.3 * _ROW, joints + 1, middle[1:-1] - 0.3 * _ROW, QUIET)
    unit = "ms" if max(map(abs, ends)) < SECONDS else "s"
    for name, length, x, y in zip([*bars, "measured"], stops - starts, np.maximum(since, to), middle, strict=True):
        picture.text(left - 10, y, name, 13, INK, "right")
        picture.text(x + 8, y, _figure(float(length), total, unit), 13, INK)
    return picture


def _figure(seconds: float, total: float, unit: str) -> str:
    share = f"  {100 * seconds / total:.1f} %" if total else ""
    return f"{seconds * (1e3 if unit == 'ms' else 1):.2f} {unit}{share}"
