"""Figures of matplotlib, laid out in pixels, and as PNG or SVG.

matplotlib is imported when the first figure is made. It then writes nothing but into a folder that is gone afterwards,
says nothing, and reads no settings of the user's: a picture is the same on every machine. Nothing of it is global:
no pyplot, and its settings are the defaults while a figure is made or saved.

A figure has no axes: these, and a text object for each number, took most of the time that a run needs at its end.
Many short texts are one artist (`Labels`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import BytesIO
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

Floats = npt.NDArray[np.floating[Any]]

_ONE_AT_A_TIME = Lock()
SHARP = 1000  # pixels: a narrower layout is of a picture that is shown larger than that, or on a fine screen
DPI = 100  # pixels of a figure per inch; points are 1/72 of one
# What is set beside matplotlib's defaults: text of an SVG stays text, and the same picture has the same bytes.
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "engine", "path.simplify": False}


class Picture:
    """A figure laid out in `width` x `height` pixels. The PNG of one that is small has twice as many each way.

    Points are in pixels from the upper left corner. What is drawn later lies over what was drawn before; text lies
    over everything.
    """

    def __init__(self, width: int, height: int) -> None:
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D

        self.figure: Figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
        self.width, self.height = width, height
        self._pixels: Transform = Affine2D().scale(1 / width, -1 / height).translate(0, 1) + self.figure.transFigure

    def boxes(
        self, left: Floats, top: Floats, right: Floats, bottom: Floats, colour: str | Sequence[str], line: float = 0
    ) -> None:
        """Rectangles of one colour, or of a colour each; with `line`, only their frames, that many pixels wide."""
        from matplotlib.collections import PolyCollection

        if not len(left):
            return
        corners = np.stack([left, top, left, bottom, right, bottom, right, top], axis=1).reshape(-1, 4, 2)
        paint: dict[str, Any] = {"facecolors": "none", "edgecolors": colour} if line else {"facecolors": colour}
        self._add(PolyCollection(list(corners), antialiaseds=False, linewidths=points(line), **paint))

    def line(self, x: Floats, y: Floats, colour: str, width: float) -> None:
        """A line from point to point."""
        from matplotlib.lines import Line2D

        # A line of matplotlib's ends in half a square beyond its last point; nothing is to lie outside of what is said.
        how: dict[str, Any] = {"solid_capstyle": "butt", "solid_joinstyle": "miter"}
        self._add(Line2D(x.tolist(), y.tolist(), color=colour, linewidth=points(width), antialiased=False, **how))

    def labels(self, x: Floats, y: Floats, said: Sequence[str], size: float, colour: str) -> None:
        """Many short texts of one size, each in the middle of its point: numbers on blocks."""
        from engine.report.pictures.labels import Labels

        if len(said):
            self._add(Labels(x, y, said, points(size), colour))

    def _add(self, artist: Artist) -> None:
        artist.set_transform(self._pixels)
        artist.set_zorder(1 + 1e-3 * len(self.figure.get_children()))  # text has 3
        self.figure.add_artist(artist)

    def text(self, x: float, y: float, said: str, size: float, colour: str, anchor: str = "left") -> None:
        """A line of text beside a point in pixels, in the middle of its height; `anchor` is left, center or right."""
        self.figure.text(
            x / self.width, 1 - y / self.height, said, fontsize=points(size), color=colour,
            ha=anchor, va="center_baseline", parse_math=False,
        )  # fmt: skip

    @property
    def scale(self) -> int:
        """Pixels of the PNG for each of the layout."""
        return 2 if self.width < SHARP else 1

    @cached_property
    def png(self) -> bytes:
        """The picture as a PNG."""
        return self._saved("png", dpi=DPI * self.scale, pil_kwargs={"compress_level": 3})

    @cached_property
    def svg(self) -> bytes:
        """The picture as an SVG; its text is text."""
        return self._saved("svg", metadata={"Date": None})

    def _saved(self, form: str, **how: Any) -> bytes:
        buffer = BytesIO()
        with defaults():
            self.figure.savefig(buffer, format=form, **how)
        return buffer.getvalue()


def preload() -> None:
    """Import matplotlib in the background, so that the first picture does not have to wait for it."""
    Thread(target=_load, name="pictures").start()


def points(pixels: float) -> float:
    """The size of a font or the width of a line in points."""
    return pixels * 72 / DPI


def text_width(said: str, size: float) -> float:
    """About the pixels that a text takes in matplotlib's own font."""
    return 0.64 * size * len(said)


@contextmanager
def defaults() -> Iterator[None]:
    """Give matplotlib its default settings and ours, and afterwards what it had. Whatever draws does so within."""
    _load()
    import matplotlib

    # Not `matplotlib.style`, which reads all styles that there are. Which backend is the user's is none of a picture's.
    now, usual = matplotlib.rcParams, matplotlib.rcParamsDefault
    other: Any = {name: usual[name] for name in usual if not name.startswith("backend") and now[name] != usual[name]}
    with matplotlib.rc_context(other | _SETTINGS):
        yield


def _load() -> None:
    """Import matplotlib, without a line on the screen and without a file that stays."""
    with _ONE_AT_A_TIME:
        if "matplotlib.figure" not in sys.modules:
            _import()


def _import() -> None:
    log, names = logging.getLogger("matplotlib"), ("MPLCONFIGDIR", "MPL_IGNORE_SYSTEM_FONTS")
    level, before = log.level, {name: os.environ.get(name) for name in names}
    with TemporaryDirectory(prefix="pictures-") as folder:
        os.environ |= {"MPLCONFIGDIR": folder, "MPL_IGNORE_SYSTEM_FONTS": "1"}
        log.setLevel(logging.CRITICAL)
        try:
            import matplotlib.figure  # noqa: F401
        finally:
            log.setLevel(level)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
