"""Many short texts as one artist of matplotlib, where a text object each would take most of a picture's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D, IdentityTransform

if TYPE_CHECKING:
    from matplotlib.backend_bases import GraphicsContextBase, RendererBase

Floats = npt.NDArray[np.floating[Any]]


class Labels(Artist):
    """`said[i]` in the middle of the point (x[i], y[i]), in the coordinates of the artist's transform.

    Each different text is laid out once. In a PNG its outline is then stamped at all of its places; an SVG gets texts.
    """

    def __init__(self, x: Floats, y: Floats, said: Sequence[str], size: float, colour: str) -> None:
        super().__init__()
        self._at, self._said, self._colour = np.stack([x, y], axis=1), np.asarray(said), colour
        self._font = FontProperties(size=size)

    def draw(self, renderer: RendererBase) -> None:
        """Draw all texts; called by the figure."""
        gc = renderer.new_gc()
        gc.set_foreground(self._colour)
        places = self.get_transform().transform(self._at)
        draw = self._stamp if isinstance(renderer, RendererAgg) else self._write
        for word in np.unique(self._said):
            draw(renderer, gc, str(word), places[self._said == word])
        gc.restore()

    def _stamp(self, renderer: RendererBase, gc: GraphicsContextBase, word: str, places: Floats) -> None:
        outline = TextPath((0, 0), word, prop=self._font)
        middle = (outline.vertices.min(axis=0) + outline.vertices.max(axis=0)) / 2
        gc.set_linewidth(0)
        onto = Affine2D().translate(*-middle).scale(float(np.asarray(renderer.points_to_pixels(1))))
        renderer.draw_markers(gc, outline, onto, Path(places), IdentityTransform(), gc.get_rgb())

    def _write(self, renderer: RendererBase, gc: GraphicsContextBase, word: str, places: Floats) -> None:
        wide, high, deep = renderer.get_text_width_height_descent(word, self._font, ismath=False)
        base = (high - deep) / 2 - deep / 2
        _, whole = renderer.get_canvas_width_height()
        for x, y in places.tolist():
            renderer.draw_text(gc, x - wide / 2, (whole - y if renderer.flipy() else y) + base, word, self._font, 0)
