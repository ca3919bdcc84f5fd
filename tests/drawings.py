"""Pictures of the report as pixels."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from PIL import Image

from engine.report.pictures.timeline import WIDE, Panel, draw


def image_of(panels: Sequence[Panel], width: int = WIDE) -> Image.Image:
    """The picture of `panels` as it is written to a file, in RGB."""
    return Image.open(BytesIO(draw(panels, width).png)).convert("RGB")
