"""Many short texts on a picture: each in the middle of its point, in a PNG and in an SVG, laid out once."""

from __future__ import annotations

import re
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from engine.report.pictures import labels
from engine.report.pictures.figure import SHARP, Picture, defaults
from engine.report.pictures.waterfall import draw_bars

PLACES = [(40.0, 20.0), (110.0, 20.0), (40.0, 70.0), (160.0, 70.0)]
WORDS = ["8", "17", "8", "17"]


def picture(width: int = SHARP) -> Picture:
    with defaults():
        made = Picture(width, 100)
        x, y = np.array(PLACES).T
        made.labels(x, y, WORDS, 14, "#000000")
    return made


@pytest.mark.parametrize("width", [SHARP, SHARP - 1])
def test_each_stands_in_the_middle_of_its_point(width: int) -> None:
    """Also where the PNG has two pixels for each of the layout."""
    made = picture(width)
    dark = np.asarray(Image.open(BytesIO(made.png)).convert("L")) < 128
    assert made.scale == (1 if width == SHARP else 2)
    for x, y in PLACES:
        left, top = (round(made.scale * (at - 15)) for at in (x, y))
        rows, columns = np.nonzero(dark[top : top + 30 * made.scale, left : left + 30 * made.scale])
        for ink in (rows, columns):
            assert (ink.min() + ink.max()) / 2 == pytest.approx(15 * made.scale, abs=1.5 * made.scale)
        assert 8 <= np.ptp(rows) / made.scale <= 14


def test_an_svg_has_them_as_text() -> None:
    svg = picture().svg.decode()
    found = re.findall(r"<text [^>]*translate\(([\d.]+) ([\d.]+)\)[^>]*>(\d+)</text>", svg)
    assert sorted(word for *_, word in found) == sorted(WORDS)
    for (x, y), word in zip(PLACES, WORDS, strict=True):
        near = [(float(a) / 0.72 - x, float(b) / 0.72 - y) for a, b, said in found if said == word]
        right, below = min(near, key=lambda at: abs(at[0]) + abs(at[1]))
        assert right == pytest.approx(-4.5 * len(word), abs=1.5)  # where the text begins
        assert 3 < below < 7  # its base line


def test_a_text_is_laid_out_once_however_often_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    made = labels.TextPath
    monkeypatch.setattr(labels, "TextPath", lambda at, said, **how: (seen.append(said), made(at, said, **how))[1])
    assert picture().png
    assert sorted(seen) == ["17", "8"]


@pytest.mark.parametrize(("step", "said"), [(9.9, "9900.00 ms"), (12.0, "12.00 s"), (3600.0, "3600.00 s")])
def test_a_waterfalls_figures_have_room(step: float, said: str) -> None:
    """Long steps are told in seconds, and nothing is cut off at the right."""
    fall = draw_bars({"work": step, "rest": 0.0}, "a step")
    assert said.encode() in fall.svg
    dark = np.asarray(Image.open(BytesIO(fall.png)).convert("L")) < 128
    assert not dark[:, -4 * fall.scale :].any()
