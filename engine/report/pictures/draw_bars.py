"""The waterfall as a picture: a bar per cause, each beginning where the one above it ended."""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image, ImageDraw

from engine.report.pictures.draw import MARGIN, WIDTH, font
from engine.report.pictures.palette import BAR_COLOURS, INK, PAPER, QUIET

_ROW, _GAP, _NAMES, _FIGURES = 30, 6, 120, 150


def draw_bars(bars: Mapping[str, float], title: str) -> Image.Image:
    """`bars`: seconds by name, in order. The last row is their sum; a negative one goes to the left."""
    ends, reached = [], 0.0
    for bar in bars.values():
        ends.append((reached, reached + bar))
        reached += bar
    low, high = (side(moment for pair in ends for moment in pair) for side in (min, max))
    image = Image.new("RGB", (WIDTH, 2 * MARGIN + _ROW * (len(bars) + 2)), PAPER)
    pen = ImageDraw.Draw(image)
    left, right = MARGIN + _NAMES, WIDTH - MARGIN - _FIGURES
    scale = (right - left) / ((high - low) or 1.0)
    pen.text((MARGIN, MARGIN + _ROW / 2), title, INK, font(16), anchor="lm")
    rows = [*zip(bars, ends, strict=True), ("measured", (0.0, reached))]
    for number, (name, (start, end)) in enumerate(rows, 1):
        top = MARGIN + number * _ROW
        a, b = (left + (moment - low) * scale for moment in (min(start, end), max(start, end)))
        pen.rectangle((a, top + _GAP, max(a + 1, b), top + _ROW - _GAP), BAR_COLOURS.get(name, QUIET))
        pen.text((left - 10, top + _ROW / 2), name, INK, font(13), anchor="rm")
        pen.text((b + 8, top + _ROW / 2), _figure(end - start, reached), INK, font(13), anchor="lm")
        if number < len(bars):
            at = left + (end - low) * scale
            pen.line((at, top + _ROW - _GAP, at, top + _ROW + _GAP), QUIET)
    return image


def _figure(seconds: float, total: float) -> str:
    share = f"  {100 * seconds / total:.1f} %" if total else ""
    return f"{seconds * 1e3:.2f} ms{share}"
