"""A timeline as a picture: a row per rank, a block per action, idle time left blank.

Several timelines stand below each other on one time axis, so that predicted and measured can be compared by eye.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from engine.account.path import Link
from engine.plan.timeline import BEHIND, COMPUTE_KINDS, Kind, Timeline
from engine.ranks import Rank
from engine.report.pictures.palette import COLOURS, INK, PAPER, QUIET, WORDS

WIDTH = 1400  # pixels
MARGIN = 16
_LABELS = 120  # left of the rows
_TITLE, _AXIS, _LEGEND = 34, 40, 34  # heights
_LEAST_ROW, _MOST_ROW, _ROWS = 6, 30, 640  # a row's height, and what all rows of a panel may take together
_ALL, _UPPER, _LOWER = range(3)  # of a row
_GRID, _IDLE = (222, 222, 222), (246, 246, 246)


@dataclass(frozen=True)
class Panel:
    """A titled timeline. `unit`: seconds per unit of its times: 1e-9 for measured ones. `ranks` is P; `path`: its
    critical path, to be drawn over it; `uncertainty`: of each rank's clock, in `unit`, shown beside its name."""

    title: str
    timeline: Timeline
    unit: float
    ranks: int
    path: Sequence[Link] = ()
    uncertainty: Sequence[int] = ()


def draw(panels: Sequence[Panel], width: int = WIDTH) -> Image.Image:
    """One picture, the panels below each other on a common axis in ms that begins at each one's first action."""
    span = max((_extent(panel)[1] for panel in panels), default=0.0) or 1e-3
    heights = [_TITLE + _row_height(panel.timeline.ranks) * panel.timeline.ranks + _AXIS for panel in panels]
    image = Image.new("RGB", (width, MARGIN + sum(heights) + _LEGEND), PAPER)
    pen = ImageDraw.Draw(image)
    top = MARGIN
    for panel, height in zip(panels, heights, strict=True):
        _Canvas(pen, top, width - MARGIN, span).draw(panel)
        top += height
    kinds = {Kind(kind) for panel in panels for kind in np.unique(panel.timeline.kind).tolist()}
    framed = any(len(panel.timeline.pairs) for panel in panels)
    _legend(pen, top, kinds, framed, any(panel.path for panel in panels))
    return image


def _extent(panel: Panel) -> tuple[Any, float]:
    """The moment at which the axis begins, and how many seconds of the panel come after it."""
    timeline = panel.timeline
    shown = np.isin(timeline.kind, COMPUTE_KINDS)
    begin = timeline.start[shown].min() if shown.any() else timeline.windows.min()
    end = max(timeline.windows[:, 1].max(), timeline.end.max(initial=begin))
    return begin, float(end - begin) * panel.unit


def _row_height(rows: int) -> int:
    return min(_MOST_ROW, max(_LEAST_ROW, _ROWS // max(1, rows)))


def font(size: float) -> Any:
    return ImageFont.load_default(size)


class _Canvas:
    """Where one panel is drawn: rows from `top`, seconds 0..`span` between the labels and `right`."""

    def __init__(self, pen: ImageDraw.ImageDraw, top: int, right: int, span: float) -> None:
        self.pen, self.top, self.left, self.right, self.span = pen, top, MARGIN + _LABELS, right, span

    def x(self, seconds: npt.NDArray[np.float64] | float) -> Any:
        return self.left + np.asarray(seconds) / self.span * (self.right - self.left)

    def draw(self, panel: Panel) -> None:
        timeline, rows = panel.timeline, self.top + _TITLE
        height = _row_height(timeline.ranks)
        bottom = rows + height * timeline.ranks
        self.pen.text((MARGIN, self.top + _TITLE / 2), panel.title, INK, font(16), anchor="lm")
        self._axis(rows, bottom)
        for rank in range(timeline.ranks):
            self._label(panel, rank, rows + rank * height, height)
        begin, _ = _extent(panel)
        left, right = (self.x((t - begin) * panel.unit) for t in (timeline.start, timeline.end))
        self._blocks(timeline, left, right, rows, height)
        self._frames(timeline, left, right, rows, height)
        self._path(panel, rows, height)

    def _path(self, panel: Panel, rows: int, height: int) -> None:
        """A line along the upper edges of what held the step up, and from rank to rank where it changes."""
        begin, _ = _extent(panel)
        points = []
        for link in panel.path:
            level = rows + link.rank * height + min(3, height // 3)
            points += [(float(self.x((t - begin) * panel.unit)), level) for t in (link.start, link.end)]
        points = [(max(x, self.left), y) for x, y in points]
        if points:
            self.pen.line(points, INK, 2)

    def _axis(self, rows: int, bottom: int) -> None:
        self.pen.rectangle((self.left, rows, self.right, bottom), _IDLE)
        step = _round_step(self.span * 1e3 / 12)
        for tick in np.arange(0, self.span * 1e3 * (1 + 1e-9), step).tolist():
            at = float(self.x(tick / 1e3))
            self.pen.line((at, rows, at, bottom + 4), _GRID)
            self.pen.text((at, bottom + 7), f"{tick:g}", QUIET, font(11), anchor="ma")
        self.pen.text((self.left - 10, bottom + 7), "ms", QUIET, font(11), anchor="ra")

    def _label(self, panel: Panel, rank: int, top: int, height: int) -> None:
        if height < 10 and rank % -(-10 // height):
            return
        _, replica, own = Rank.of(rank, panel.ranks)
        text = f"rank {own}" if panel.timeline.ranks == panel.ranks else f"replica {replica}  rank {own}"
        doubt = panel.uncertainty[rank] * panel.unit if panel.uncertainty else 0.0
        if doubt:
            text += f" ±{doubt * 1e3:.2g} ms"
        self.pen.text((self.left - 10, top + height / 2), text, INK, font(min(12, height)), anchor="rm")

    def _blocks(self, timeline: Timeline, left: Any, right: Any, rows: int, height: int) -> None:
        """Blocks of at least a pixel; what runs behind the others gets a strip at the bottom of its row."""
        small = font(min(12, height * 0.55))
        columns = (timeline.rank, timeline.kind, timeline.microbatch, left, right, _parts(timeline))
        gap = 1 if height >= 12 else 0
        for rank, number, microbatch, a, b, part in zip(*(column.tolist() for column in columns), strict=True):
            colour = COLOURS.get(Kind(number))
            if colour is None or b < self.left or a > self.right:
                continue
            top, bottom = rows + rank * height + gap, rows + (rank + 1) * height - 1 - gap
            if number in BEHIND:
                top = bottom - max(1, height // 7)
            elif part != _ALL:
                top, bottom = (top, (top + bottom) // 2) if part == _UPPER else ((top + bottom) // 2 + 1, bottom)
            a, b = round(max(a, self.left)), round(min(b, self.right))
            between = 2 if b - a > 4 else 1  # a line of paper between neighbours of one colour
            self.pen.rectangle((a, top, max(a, b - between), bottom), colour)
            if number in COMPUTE_KINDS and height >= 14:
                text = str(microbatch)
                if self.pen.textlength(text, small) + 4 < b - a:
                    self.pen.text(((a + b) / 2, (top + bottom) / 2), text, INK, small, anchor="mm")

    def _frames(self, timeline: Timeline, left: Any, right: Any, rows: int, height: int) -> None:
        """A line around the two blocks of each overlapped pair: they are one action."""
        for first, second in timeline.pairs.tolist():
            a, b = min(left[first], left[second]), max(right[first], right[second])
            if b >= self.left and a <= self.right and height >= 12:
                top = rows + int(timeline.rank[first]) * height
                a, b = round(max(a, self.left)), round(min(b, self.right))
                self.pen.rectangle((a, top, max(a, b - 2), top + height - 1), outline=INK)


def _parts(timeline: Timeline) -> npt.NDArray[np.int64]:
    """Which part of its row each block takes: half of it where the computations of a pair were done together."""
    parts = np.full(len(timeline), _ALL)
    first, second = timeline.pairs.T
    at_once = timeline.start[second] < timeline.end[first]
    parts[first[at_once]], parts[second[at_once]] = _UPPER, _LOWER
    return parts


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 x 10^k that is not below `least`."""
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)))


def _legend(pen: ImageDraw.ImageDraw, top: int, kinds: set[Kind], pairs: bool, path: bool) -> None:
    x, y = MARGIN + _LABELS, top + _LEGEND // 2 - 4
    for kind in [kind for kind in COLOURS if kind in kinds]:
        pen.rectangle((x, y - 6, x + 14, y + 6), COLOURS[kind])
        pen.text((x + 20, y), WORDS[kind], INK, font(12), anchor="lm")
        x += 36 + round(pen.textlength(WORDS[kind], font(12)))
    for word, edge in [("overlapped pair", INK)] * pairs + [("bubble", _GRID)]:
        pen.rectangle((x, y - 6, x + 14, y + 6), _IDLE, edge)
        pen.text((x + 20, y), word, INK, font(12), anchor="lm")
        x += 36 + round(pen.textlength(word, font(12)))
    if path:
        pen.line((x, y, x + 14, y), INK, 2)
        pen.text((x + 20, y), "critical path", INK, font(12), anchor="lm")
