"""A timeline as a picture: a row per rank, a block per action, idle time left blank.

Several timelines stand below each other on one time axis, so that predicted and measured can be compared by eye.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.account.path import PathLink
from engine.plan.timeline import BEHIND, COMPUTE_KINDS, Timeline
from engine.ranks import Rank
from engine.report.pictures.figure import Picture, defaults, text_width
from engine.report.pictures.palette import COLOURS, INK, QUIET, WORDS

WIDE, SMALL = 1400, 600  # pixels: of a file that is looked at by itself, and of one in a list of many
MARGIN = 16
_LABELS = 120  # left of the rows
_TITLE, _AXIS, _LEGEND = 34, 40, 20  # heights; of the legend for each line
_LEAST_ROW, _MOST_ROW, _ROWS = 6, 30, 640  # a row's height, and what all rows of a panel may take together
_GRID, _IDLE = "#dedede", "#f6f6f6"
_ALL, _UPPER, _LOWER = range(3)  # of a row
MOST_NUMBERS = 1000  # blocks of a panel that have their micro-batch written on them: text is slow

_Floats = npt.NDArray[np.float64]
_Some = _Floats | Sequence[float]


@dataclass(frozen=True)
class Panel:
    """A titled timeline.

    `unit`: seconds per unit of its times: 1e-9 for measured ones. `ranks` is P; `path`: its critical path, to be drawn
    over it; `uncertainty`: of each rank's clock, in `unit`, shown beside its name.
    """

    title: str
    timeline: Timeline
    unit: float
    ranks: int
    path: Sequence[PathLink] = ()
    uncertainty: Sequence[int] = ()


@defaults()
def draw(panels: Sequence[Panel], width: int = WIDE) -> Picture:
    """Draw panels below each other, on a common axis in ms that begins at each one's first action."""
    span = 1e3 * max((_extent(panel)[1] for panel in panels), default=0.0) or 1.0
    heights = [_TITLE + _row_height(panel.timeline.ranks) * panel.timeline.ranks + _AXIS for panel in panels]
    entries = _entries(panels)
    room = max(text_width(entry.word, 12) for entry in entries) + 40
    columns = min(max(1, int((width - 2 * MARGIN) / room)), len(entries))
    lines = -(-len(entries) // columns)
    picture = Picture(width, MARGIN + sum(heights) + 14 + _LEGEND * lines)
    top = MARGIN
    for panel, height in zip(panels, heights, strict=True):
        _Drawing(picture, panel, top, span).draw()
        top += height
    for index, (word, colour, look) in enumerate(entries):
        line, column = divmod(index, columns)
        _entry(picture, word, colour, look, MARGIN + column * room, top + _LEGEND * (line + 0.5))
    return picture


def _extent(panel: Panel) -> tuple[Any, float]:
    """The moment at which the axis begins, and how many seconds of the panel come after it."""
    timeline = panel.timeline
    shown = np.isin(timeline.kind, COMPUTE_KINDS)
    begin = timeline.start[shown].min() if shown.any() else timeline.windows.min()
    end = max(timeline.windows[:, 1].max(), timeline.end.max(initial=begin))
    return begin, float(end - begin) * panel.unit


def _row_height(rows: int) -> int:
    return min(_MOST_ROW, max(_LEAST_ROW, _ROWS // max(1, rows)))


class _Drawing:
    """One panel, whose rows begin at `top` and are `span` milliseconds long."""

    def __init__(self, picture: Picture, panel: Panel, top: int, span: float) -> None:
        self.picture, self.panel, self.timeline = picture, panel, panel.timeline
        self.height, self.top = _row_height(self.timeline.ranks), top + _TITLE
        self.left, self.right = MARGIN + _LABELS, picture.width - MARGIN
        self.span, self.pixel = span, span / (self.right - self.left)  # milliseconds, of all and of a pixel
        picture.text(MARGIN, top + _TITLE / 2, panel.title, 16, INK)
        self.begin, _ = _extent(panel)
        self.start, self.end = self._at(self.timeline.start), self._at(self.timeline.end)

    def _at(self, moment: npt.NDArray[Any]) -> _Floats:
        """Where moments of the timeline are, in pixels from the left."""
        found = self.left + (moment - self.begin) * self.panel.unit * 1e3 / self.pixel
        return np.asarray(found, dtype=np.float64)

    def draw(self) -> None:
        """Everything, what is drawn later over what is drawn before."""
        self._axis()
        self._blocks()
        self._frames()
        self._path()

    def _axis(self) -> None:
        """The ground, lines at round numbers of milliseconds, and what ranks are called."""
        bottom = self.top + self.height * self.timeline.ranks
        self._boxes([self.left], [self.right], [self.top], [bottom], _IDLE)
        marks = ticks(self.span, (self.right - self.left) / 100)
        lines = np.round(self.left + np.array(marks) / self.pixel)
        self._boxes(lines, lines + 1, np.full(len(marks), self.top), np.full(len(marks), bottom + 4), _GRID)
        for mark in marks:
            self.picture.text(self.left + mark / self.pixel, bottom + 13, f"{mark:g}", 11, QUIET, "center")
        self.picture.text(self.left - 10, bottom + 13, "ms", 11, QUIET, "right")
        for rank in range(0, self.timeline.ranks, max(1, -(-10 // self.height))):
            middle = self.top + (rank + 0.5) * self.height
            self.picture.text(self.left - 10, middle, self._name(rank), min(12, self.height), INK, "right")

    def _name(self, rank: int) -> str:
        panel = self.panel
        _, replica, own = Rank.of(rank, panel.ranks)
        text = f"rank {own}" if self.timeline.ranks == panel.ranks else f"replica {replica}  rank {own}"
        doubt = panel.uncertainty[rank] * panel.unit if panel.uncertainty else 0.0
        return f"{text} ±{doubt * 1e3:.2g} ms" if doubt else text

    def _blocks(self) -> None:
        """Blocks of at least a pixel; what runs behind the others gets a strip at the bottom of its row."""
        timeline = self.timeline
        gap = 1 if self.height >= 12 else 0
        row = self.top + self.height * timeline.rank.astype(np.float64)
        top, bottom = row + gap, row + self.height - gap - 1
        behind, parts, middle = np.isin(timeline.kind, BEHIND), _parts(timeline), (top + bottom) / 2
        top = np.where(behind, bottom - max(1, self.height // 7), np.where(parts == _LOWER, middle, top))
        bottom = np.where(parts == _UPPER, middle, bottom)
        wide = self.end - self.start
        between = np.where(wide > 4, 2, 1)  # a line of paper between blocks of one colour
        end = np.maximum(self.start + 1, self.end - between)
        seen = (self.end >= self.left) & (self.start <= self.right)
        for kind, colour in COLOURS.items():
            here = seen & (timeline.kind == kind)
            self._boxes(self.start[here], end[here], top[here], bottom[here], colour)
        self._numbers(np.flatnonzero(seen & np.isin(timeline.kind, COMPUTE_KINDS)), middle)

    def _boxes(self, left: _Some, right: _Some, top: _Some, bottom: _Some, colour: str, line: float = 0) -> None:
        """Boxes, cut off at the edges of the rows."""
        across = (np.clip(edge, self.left, self.right + 1).astype(np.float64) for edge in (left, right))
        down = (np.asarray(edge, np.float64) for edge in (top, bottom))
        (x, to_x), (y, to_y) = across, down
        self.picture.boxes(x, y, to_x, to_y, colour, line)

    def _numbers(self, spans: npt.NDArray[np.int64], middle: _Floats) -> None:
        """The micro-batch on each block that has room for it."""
        size = min(12, self.height * 0.55)
        if self.height < 14:
            return
        room = (self.end - self.start)[spans] - 4
        numbers = self.timeline.microbatch[spans].astype(str)
        fitting = room > text_width("0", size) * np.char.str_len(numbers)
        if fitting.sum() <= MOST_NUMBERS:
            shown = spans[fitting]
            across = (self.start + self.end)[shown] / 2 - 1
            self.picture.labels(across, middle[shown], numbers[fitting].tolist(), size, INK)

    def _frames(self) -> None:
        """A line around the two blocks of each overlapped pair: they are one action."""
        first, second = self.timeline.pairs.T
        if len(first) and self.height >= 12:
            left, right = (
                np.minimum(self.start[first], self.start[second]),
                np.maximum(self.end[first], self.end[second]),
            )
            row = self.top + self.height * self.timeline.rank[first].astype(np.float64)
            right = np.maximum(left, right - 2)
            self._boxes(left, right, row, row + self.height - 1, INK, line=1)

    def _path(self) -> None:
        """A line along the upper edges of what held the step up, and from rank to rank where it changes."""
        ends = [(link.start, link.end) for link in self.panel.path]
        if ends:
            x = self._at(np.array(ends).ravel())
            y = np.repeat(
                [self.top + link.rank * self.height + min(3, self.height // 3) for link in self.panel.path], 2
            )
            self.picture.line(np.maximum(self.left, x), y, INK, 2)


def ticks(span: float, about: float) -> list[float]:
    """Round numbers from 0 to `span`, in steps of 1, 2 or 5 times a power of ten; about so many."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(max(2, int(about)), steps=[1, 2, 5, 10]).tick_values(0, span)
    return [float(mark) for mark in found if 0 <= mark <= span * (1 + 1e-9)]


def _parts(timeline: Timeline) -> npt.NDArray[np.int64]:
    """Which part of its row each block takes: half of it where the computations of a pair were done together."""
    parts = np.full(len(timeline), _ALL)
    first, second = timeline.pairs.T
    at_once = timeline.start[second] < timeline.end[first]
    parts[first[at_once]], parts[second[at_once]] = _UPPER, _LOWER
    return parts


class _Entry(NamedTuple):
    """An entry of the legend: `look` is block, frame or line."""

    word: str
    colour: str
    look: str


def _entries(panels: Sequence[Panel]) -> list[_Entry]:
    """The legend: what is on the panels, in words, with something that looks like it."""
    kinds = set(itertools.chain.from_iterable(np.unique(panel.timeline.kind).tolist() for panel in panels))
    found = [_Entry(WORDS[kind], COLOURS[kind], "block") for kind in COLOURS if kind in kinds]
    if any(len(panel.timeline.pairs) for panel in panels):
        found.append(_Entry("overlapped pair", INK, "frame"))
    found.append(_Entry("bubble", _GRID, "frame"))
    if any(panel.path for panel in panels):
        found.append(_Entry("critical path", INK, "line"))
    return found


def _entry(picture: Picture, word: str, colour: str, look: str, left: float, middle: float) -> None:
    """Draw an entry of the legend beside a point."""
    x, y = np.array([left, left + 14]), np.array([middle - 4, middle + 4])
    if look == "line":
        picture.line(x, np.full(2, middle), colour, 2)
    else:
        box = x[:1], y[:1], x[1:], y[1:]
        picture.boxes(*box, _IDLE if look == "frame" else colour)
        if look == "frame":
            picture.boxes(*box, colour, line=1)
    picture.text(left + 20, middle, word, 12, INK)
