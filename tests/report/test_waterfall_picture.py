"""The waterfall as a picture: each bar begins where the one above it ended, and the last is their sum."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from engine.account.replay.waterfall import BARS
from engine.categories import WATERFALL
from engine.report.pictures.palette import QUIET
from engine.report.pictures.timeline import SMALL, WIDE
from engine.report.pictures.waterfall import draw_bars

BAR_COLOURS = {bar.name: bar.colour for bar in WATERFALL}


def extent(image: Image.Image, row: int, colour: str) -> tuple[int, int]:
    """The first and the last column of a row's bar."""
    pixels = np.asarray(image)[16 + 30 * row + 10]
    columns = np.flatnonzero((pixels == tuple(bytes.fromhex(colour[1:]))).all(axis=1))
    return int(columns[0]), int(columns[-1])


def test_bars_join() -> None:
    bars = {"work": 0.06, "schedule": 0.03, "imbalance": 0.01, "rest": -0.02}
    picture = Image.open(BytesIO(draw_bars(bars, "title", WIDE).png)).convert("RGB")
    places = [extent(picture, row, BAR_COLOURS[name]) for row, name in enumerate(bars, 1)]
    work, schedule, imbalance, rest = places
    assert schedule[0] == pytest.approx(work[1], abs=2) and imbalance[0] == pytest.approx(schedule[1], abs=2)
    assert rest[1] == pytest.approx(imbalance[1], abs=2)  # a negative bar goes back
    assert rest[0] == pytest.approx(imbalance[1] - 0.2 * (imbalance[1] - work[0]), abs=3)
    whole = extent(picture, 5, QUIET)
    assert whole[0] == work[0] and whole[1] == pytest.approx(rest[0], abs=2)


def test_every_bar_has_a_colour_and_nothing_is_a_picture_too() -> None:
    assert set(BAR_COLOURS) == set(BARS)
    nothing = draw_bars(dict.fromkeys(BARS, 0.0), "nothing")
    assert nothing.width == SMALL and nothing.png.startswith(b"\x89PNG") and b"0.00 ms" in nothing.svg
