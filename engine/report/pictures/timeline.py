"""A timeline as a picture: a row per rank, a block per action, idle time left blank.

Several timelines stand below each other on one time axis, so that predicted and measured can be compared by eye.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.account.path import PathLink
from engine.plan.timeline import BEHIND, COMPUTE_KINDS, Timeline
from engine.ranks import Rank
from engine.report.pictures.figure import Picture, defaults, points, text_width
from engine.report.pictures.palette import COLOURS, INK, QUIET, WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, SMALL = 1400, 600  # pixels: of a file that is looked at by itself, and of one in a list of many
MARGIN = 16
_LABELS = 120  # left of the rows
_TITLE, _AXIS, _LEGEND = 34, 40, 20  # heights; of the legend for each line
_LEAST_ROW, _MOST_ROW, _ROWS = 6, 30, 640  # a row's height, and what all rows of a panel may take together
_GRID, _IDLE = "#dedede", "#f6f6f6"
_ALL, _UPPER, _LOWER = range(3)  # of a row
MOST_NUMBERS = 1000  # blocks of a panel that have their micro-batch written on them: text is slow

_Floats = npt.NDArray[np.float64]


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
    columns = max(1, int((width - 2 * MARGIN) / max(text_width(word, 12) + 40 for word, _ in entries)))
    columns = min(columns, len(entries))
    lines = -(-len(entries) // columns)
    picture = Picture(width, MARGIN + sum(heights) + 14 + _LEGEND * lines)
    top = MARGIN
    for panel, height in zip(panels, heights, strict=True):
        _Drawing(picture, panel, top, span).draw()
        top += height
    names, handles = zip(*entries, strict=True)
    picture.figure.legend(
        handles, names, loc="upper left", bbox_to_anchor=(MARGIN / width, 1 - top / picture.height), ncols=columns,
        frameon=False, fontsize=points(12), labelcolor=INK, borderpad=0, borderaxespad=0, handlelength=1.2,
        handletextpad=0.5, columnspacing=1.5,
    )  # fmt: skip
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
    """One panel in its axes, whose x are milliseconds 0..`span`, and whose y are rows from the top down."""

    def __init__(self, picture: Picture, panel: Panel, top: int, span: float) -> None:
        self.picture, self.panel, self.timeline = picture, panel, panel.timeline
        self.height, self.top = _row_height(self.timeline.ranks), top + _TITLE
        self.left, self.right = MARGIN + _LABELS, picture.width - MARGIN
        self.span, self.pixel = span, span / (self.right - self.left)  # milliseconds
        self.axes: Axes = picture.axes(self.left, self.top, self.right, self.top + self.height * self.timeline.ranks)
        self.axes.set_xlim(0, span)
        self.axes.set_ylim(self.timeline.ranks, 0)
        picture.text(MARGIN, top + _TITLE / 2, panel.title, 16, INK)
        begin, _ = _extent(panel)
        self.start, self.end = (
            np.asarray((t - begin) * panel.unit * 1e3, dtype=np.float64)
            for t in (self.timeline.start, self.timeline.end)
        )
        self.begin = begin

    def draw(self) -> None:
        """Everything, what is drawn later over what is drawn before."""
        self._axis()
        self._blocks()
        self._frames()
        self._path()

    def _axis(self) -> None:
        """The ground, lines at round numbers of milliseconds, and what ranks are called."""
        ground = (np.array([edge], dtype=np.float64) for edge in (0, self.span, 0, self.timeline.ranks))
        self._boxes(*ground, facecolors=_IDLE, linewidths=0, zorder=0.1)
        marks = ticks(self.span, (self.right - self.left) / 100)
        self.axes.vlines(
            marks, 0, self.timeline.ranks + 4 / self.height, _GRID, linewidth=points(1), clip_on=False, zorder=0.2
        )
        below = self.top + self.height * self.timeline.ranks + 13
        for mark in marks:
            self.picture.text(self.left + mark / self.pixel, below, f"{mark:g}", 11, QUIET, "center")
        self.picture.text(self.left - 10, below, "ms", 11, QUIET, "right")
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
        timeline, pixel = self.timeline, 1 / self.height
        gap = pixel if self.height >= 12 else 0.0
        top, bottom = timeline.rank + gap, timeline.rank + 1 - gap - pixel
        behind, parts, middle = np.isin(timeline.kind, BEHIND), _parts(timeline), (top + bottom) / 2
        top = np.where(behind, bottom - max(1, self.height // 7) * pixel, np.where(parts == _LOWER, middle, top))
        bottom = np.where(parts == _UPPER, middle, bottom)
        wide = self.end - self.start
        between = np.where(wide > 4 * self.pixel, 2, 1) * self.pixel  # a line of paper between blocks of one colour
        end = np.maximum(self.start + self.pixel, self.end - between)
        seen = (self.end >= 0) & (self.start <= self.span)
        for kind, colour in COLOURS.items():
            here = seen & (timeline.kind == kind)
            self._boxes(self.start[here], end[here], top[here], bottom[here], facecolors=colour, linewidths=0)
        self._numbers(np.flatnonzero(seen & np.isin(timeline.kind, COMPUTE_KINDS)), middle)

    def _boxes(self, left: _Floats, right: _Floats, top: _Floats, bottom: _Floats, **how: Any) -> None:
        from matplotlib.collections import PolyCollection

        if len(left):
            corners = np.stack([left, top, left, bottom, right, bottom, right, top], axis=1).reshape(-1, 4, 2)
            self.axes.add_collection(PolyCollection(list(corners), antialiaseds=False, **how), autolim=False)

    def _numbers(self, spans: npt.NDArray[np.int64], middle: _Floats) -> None:
        """The micro-batch on each block that has room for it."""
        size = min(12, self.height * 0.55)
        if self.height < 14:
            return
        room = (self.end - self.start)[spans] / self.pixel - 4
        numbers = self.timeline.microbatch[spans]
        fitting = room > text_width("0", size) * np.char.str_len(numbers.astype(str))
        if fitting.sum() > MOST_NUMBERS:
            return
        for span, number in zip(spans[fitting].tolist(), numbers[fitting].tolist(), strict=True):
            at = (self.start[span] + self.end[span]) / 2 - self.pixel, middle[span]
            self.axes.text(
                *at, str(number), fontsize=points(size), color=INK, ha="center", va="center_baseline", clip_on=True
            )

    def _frames(self) -> None:
        """A line around the two blocks of each overlapped pair: they are one action."""
        first, second = self.timeline.pairs.T
        if len(first) and self.height >= 12:
            left, right = (
                np.minimum(self.start[first], self.start[second]),
                np.maximum(self.end[first], self.end[second]),
            )
            row, pixel = self.timeline.rank[first].astype(np.float64), 1 / self.height
            right = np.maximum(left, right - 2 * self.pixel)
            self._boxes(left, right, row, row + 1 - pixel, facecolors="none", edgecolors=INK, linewidths=points(1))

    def _path(self) -> None:
        """A line along the upper edges of what held the step up, and from rank to rank where it changes."""
        ends = [(link.start, link.end) for link in self.panel.path]
        if ends:
            x = np.maximum(0, (np.array(ends).ravel() - self.begin) * self.panel.unit * 1e3)
            y = np.repeat([link.rank + min(3, self.height // 3) / self.height for link in self.panel.path], 2)
            self.axes.plot(x, y, color=INK, linewidth=points(2), antialiased=False)


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


def _entries(panels: Sequence[Panel]) -> list[tuple[str, Any]]:
    """The legend: what is on the panels, in words, with something that looks like it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = set(itertools.chain.from_iterable(np.unique(panel.timeline.kind).tolist() for panel in panels))
    found: list[tuple[str, Any]] = [(WORDS[kind], Patch(color=COLOURS[kind])) for kind in COLOURS if kind in kinds]
    if any(len(panel.timeline.pairs) for panel in panels):
        found.append(("overlapped pair", Patch(facecolor=_IDLE, edgecolor=INK)))
    found.append(("bubble", Patch(facecolor=_IDLE, edgecolor=_GRID)))
    if any(panel.path for panel in panels):
        found.append(("critical path", Line2D([], [], color=INK, linewidth=points(2))))
    return found
