"""The picture, pixel by pixel where it matters: blocks where something ran, blank where nothing did, one time axis."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
import recorded
from drawings import image_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from recorded import MS, costs, measured

from engine.account.path import critical_path
from engine.plan.schedules import build
from engine.plan.simulate import Costs, simulate
from engine.plan.timeline import Kind, Span, Timeline
from engine.report.pictures import palette
from engine.report.pictures.timeline import SMALL, WIDE, Panel, draw, ticks

SKY, ORANGE, PURPLE, BLANK = (86, 180, 233), (230, 159, 0), (204, 121, 167), (246, 246, 246)


def colours(image: Image.Image) -> dict[tuple[int, int, int], int]:
    """Colour -> pixels."""
    pixels = np.asarray(image).reshape(-1, 3)
    values, counts = np.unique(pixels, axis=0, return_counts=True)
    return {tuple(v): c for v, c in zip(values.tolist(), counts.tolist(), strict=True)}


def rows_of(image: Image.Image, ranks: int, top: int = 16 + 34) -> list[list[tuple[int, int, int]]]:
    """A line of pixels near the top of each rank's row of the first panel, above the numbers."""
    pixels = np.asarray(image)
    return [[tuple(p) for p in pixels[top + 30 * rank + 3, 136:1384].tolist()] for rank in range(ranks)]


def test_colours_follow_the_program() -> None:
    """gpipe, P=2, M=2, F 1 ms and B 2 ms: makespan 9 ms, so 1 ms is a ninth of the axis."""
    program = build("gpipe", 2, 2)
    simulated = simulate(program, Costs(np.array([1.0, 2, 0, 0])[:, None, None] * 1e-3, np.zeros(2)))
    first, second = rows_of(image_of([Panel("predicted", simulated, 1.0, 2)]), 2)
    at = [round(1248 * (slot + 0.5) / 9) for slot in range(9)]
    expected = [SKY, SKY, BLANK, BLANK, BLANK, ORANGE, ORANGE, ORANGE, ORANGE]
    # The middle of a block can be next to the line between two blocks; look a little to its left.
    assert [first[x - 5] for x in at] == expected
    assert [second[x - 5] for x in at] == [BLANK, SKY, SKY, ORANGE, ORANGE, ORANGE, ORANGE, BLANK, BLANK]


def test_panels_share_their_axis() -> None:
    program = build("gpipe", 1, 1)
    fast = measured(program, costs(program))
    slow = measured(program, costs(program) * 2)
    picture = image_of([Panel("a", fast, 1e-9, 1), Panel("b", slow, 1e-9, 1)])
    (one,) = rows_of(picture, 1)
    (two,) = rows_of(picture, 1, top=16 + 34 + 30 + 40 + 34)
    assert one.count(SKY) == pytest.approx(two.count(SKY) / 2, abs=2)
    assert two[-3] == ORANGE and one[-3] == BLANK


def test_a_measured_panel_begins_at_its_first_action() -> None:
    """Not at the window's start, nor at the clock's zero."""
    spans = [
        Span(0, Kind.WAIT_F, 0, 0, 10**15, 10**15 + 50 * MS),
        Span(0, Kind.F, 0, 0, 10**15 + 50 * MS, 10**15 + 60 * MS),
    ]
    timeline = Timeline.of(spans, [[10**15, 10**15 + 60 * MS]], measured=True)
    (row,) = rows_of(image_of([Panel("measured", timeline, 1e-9, 1)]), 1)
    assert row.count(SKY) > 1240


def test_steps_and_reductions_show() -> None:
    of = recorded.job("gpipe", 2, 2, replicas=2)
    timeline = measured(of.compute, costs(of.compute), 2, step=5 * MS)
    end = int(timeline.windows.max())
    spans = [*timeline, Span(0, Kind.REDUCE, 0, -1, end - 9 * MS, end - 5 * MS)]
    spans += [Span(2, Kind.GATHER, 0, -1, end - 9 * MS, end - 5 * MS)]
    timeline = Timeline.of(spans, timeline.windows.tolist(), measured=True)
    picture = image_of([Panel("measured", timeline, 1e-9, 2)])
    seen = colours(picture)
    assert seen[PURPLE] > 4 * 20 * 30
    assert 0 < seen[(213, 94, 0)] < 14 * 14 + 6 * 400  # in the legend, and a strip that leaves the row to others
    assert 0 < seen[(153, 153, 51)] < 14 * 14 + 6 * 400
    assert PURPLE not in colours(image_of([Panel("predicted", measured(of.compute, costs(of.compute)), 1e-9, 2)]))


def test_numbers_are_left_out_where_they_do_not_fit() -> None:
    def ink(microbatches: int) -> int:
        program = build("gpipe", 1, microbatches)
        panel = image_of([Panel("", measured(program, costs(program)), 1e-9, 1)])
        return int((np.asarray(panel)[50:80, 136:] < 60).all(axis=2).sum())

    assert ink(8) > 50 and ink(2000) == 0


@pytest.mark.parametrize("ranks", [1, 16, 64, 300])
def test_any_number_of_ranks_makes_a_readable_size(ranks: int) -> None:
    program = build("gpipe", ranks, 2)
    picture = image_of([Panel("predicted", measured(program, costs(program)), 1e-9, ranks)])
    assert picture.width == WIDE and picture.height < 160 + max(640, 6 * ranks)


def test_colours_are_apart_and_every_drawn_kind_has_a_word() -> None:
    assert set(palette.COLOURS) == set(palette.WORDS)
    assert len(set(palette.COLOURS.values())) == len(palette.COLOURS) - 1  # B and I, which is the half of B


@pytest.mark.parametrize("least", [0.0003, 0.19, 1, 3, 7, 12345])
def test_ticks_are_round(least: float) -> None:
    """One, two or five times a power of ten apart, a dozen at most."""
    marks = ticks(least, 12)
    (step,) = {f"{b - a:.3e}" for a, b in pairwise(marks)}
    assert 4 <= len(marks) <= 13 and marks[0] == 0 and marks[-1] <= least * (1 + 1e-9) and step[0] in "125"


def test_an_empty_timeline_is_a_picture() -> None:
    empty = Timeline.of([], [[0, 0]], measured=True)
    assert SKY not in colours(image_of([Panel("measured", empty, 1e-9, 1)]))


def test_the_critical_path_is_a_line_from_rank_to_rank() -> None:
    program = build("gpipe", 2, 2)
    timeline = measured(program, costs(program, slow=1), transfer=MS)
    ways = [critical_path(timeline, 2), []]
    with_path, without = (np.asarray(image_of([Panel("", timeline, 1e-9, 2, way)])).astype(int) for way in ways)
    drawn = (with_path != without[: len(with_path)]).any(axis=2)[50:110, 136:1384]
    assert drawn[:30].any() and drawn[30:].any()
    assert drawn.any(axis=0).mean() > 0.95  # it leaves no moment of the step out


def test_how_well_a_clock_is_known_stands_beside_its_rank() -> None:
    program = build("gpipe", 2, 2)
    timeline = measured(program, costs(program))
    known, unsure = (np.asarray(image_of([Panel("", timeline, 1e-9, 2, (), doubt)])) for doubt in ((0, 0), (0, MS)))
    differ = (known != unsure).any(axis=2)
    assert not differ[50:80].any() and differ[80:110, :136].any() and not differ[:, 136:].any()


def test_it_can_be_read_where_it_is_small() -> None:
    """TensorBoard shows images about 400 pixels wide: letters are then still 8 pixels high, and nothing is cut off."""
    of = recorded.job("1f1b", 4, 8, replicas=2)
    timeline = measured(of.compute, costs(of.compute), 2, step=5 * MS)
    picture = draw([Panel("measured: bubble 33.3 %", timeline, 1e-9, 4, critical_path(timeline, 4))], SMALL)
    FigureCanvasAgg(picture.figure).draw()
    pixels = 400 / picture.width * picture.figure.dpi / 72
    texts = [t for t in picture.figure.findobj(Text) if t.get_text() and t.get_visible()]
    words = [t for t in texts if t.get_text().startswith(("replica", "forward", "measured"))]
    assert {t.get_text() for t in words} >= {"replica 1  rank 3", "forward", "measured: bubble 33.3 %"}
    assert all(t.get_fontsize() * pixels >= 7.9 for t in words)
    whole = picture.figure.bbox
    for text in words:
        box = text.get_window_extent()
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1, text.get_text()


def test_svg_says_the_same_in_text() -> None:
    program = build("gpipe", 2, 2)
    panels = [Panel("a <b> & $c$", measured(program, costs(program)), 1e-9, 2)]
    svg = draw(panels).svg
    words = {
        "".join(text.itertext()).strip()
        for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"a <b> & $c$", "rank 0", "rank 1", "forward", "backward", "bubble", "ms", "0", "1"} <= words
    assert svg == draw(panels).svg
