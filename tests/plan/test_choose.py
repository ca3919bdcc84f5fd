"""The comparison of schedules: figures, order, memory limit."""

import re
from pathlib import Path

import pytest
from program_strategies import ASYNCHRONOUS, EVERY

from engine.plan.choose import compare, table
from engine.plan.features import COPIES, SPLIT, VERSIONS, features
from engine.plan.schedules import SCHEDULES, build
from engine.plan.views.guide import ADVICE, ANY, guide

EQUAL = {"forward": 1, "input_backward": 1, "weight_backward": 1}


def test_the_cheapest_comes_first_and_of_equals_the_one_that_keeps_less():
    rows = compare(["gpipe", "naive", "1f1b", "zb_h1", "interleaved_1f1b"], 4, 8, EQUAL)
    assert [row.name for row in rows] == ["zb_h1", "interleaved_1f1b", "1f1b", "gpipe", "naive"]
    assert [row.cost for row in rows] == [27, 28.5, 33, 33, 96]
    assert [row.peak for row in rows] == [4, 5.5, 4, 8, 1]
    assert [row.transfers for row in rows] == [48, 112, 48, 48, 48]
    assert {row.refused for row in rows} == {None}


def test_figures_are_those_of_the_simulation():
    (row,) = compare(["zb_h2"], 4, 8, EQUAL)
    assert (row.cost, row.makespan, row.bubble_rate, row.copies) == (24, 27, 0, 1)
    assert row.bubble_fraction == pytest.approx(1 - 24 / 27)
    (row,) = compare(["dualpipe"], 4, 8, EQUAL)
    assert (row.peak, row.copies) == (5, 2)


def test_costs_change_the_order():
    """With W free there is nothing to fill holes with, and more chunks pay."""
    names = ["interleaved_1f1b", "zb_h1"]
    assert [row.name for row in compare(names, 4, 8, EQUAL)] == ["zb_h1", "interleaved_1f1b"]
    assert [row.name for row in compare(names, 4, 8, EQUAL | {"weight_backward": 0})] == names
    dear = compare(names, 4, 8, EQUAL | {"weight_backward": 0, "transfer": 2})
    assert [row.name for row in dear] == names[::-1]


def test_what_keeps_too_much_comes_last_and_says_so():
    rows = compare(["gpipe", "1f1b", "zb_v", "v_min"], 4, 8, EQUAL, memory_limit=4)
    assert [(row.name, row.refused) for row in rows] == [
        ("zb_v", None),
        ("v_min", None),
        ("1f1b", None),
        ("gpipe", "keeps 8 activations, more than 4"),
    ]
    assert [row.name for row in compare(["1f1b", "v_min"], 4, 8, EQUAL, 2) if not row.refused] == ["v_min"]


def test_what_is_not_defined_comes_last_with_the_allowed_sizes():
    rows = compare(["dualpipe", "1f1b"], 3, 8, EQUAL)
    assert rows[0].name == "1f1b"
    assert rows[1].refused == "pipeline.ranks must be even: 2, 4, 6, ..."


def test_options_are_those_of_one_schedule():
    two, four = (
        compare(["interleaved_1f1b"], 4, 8, EQUAL, options={"interleaved_1f1b": {"chunks": v}})[0] for v in (2, 4)
    )
    assert (two.cost, four.cost) == (24 + 9 / 2, 24 + 9 / 4)


@pytest.mark.parametrize(
    ("names", "costs", "complaint"),
    [
        (["gpip"], EQUAL, r"unknown schedule 'gpip'"),
        (["gpipe"], {"forwards": 1}, r"no key 'forwards'"),
        (["interleaved_1f1b"], {"forward": [1, 2, 3]}, r"lists 3 numbers for 8 stages on 4 ranks; give 4 or 8"),
        (["1f1b"], {"forward": [1] * 8}, r"lists 8 numbers for 4 stages on 4 ranks; give 4, or"),
    ],
)
def test_mistakes_are_not_rows(names, costs, complaint):
    with pytest.raises(ValueError, match=complaint):
        compare(names, 4, 8, costs)


def test_one_list_of_costs_per_rank_serves_all_schedules():
    """A slice three times as dear costs every schedule its work, cut in chunks or not."""
    rows = compare(["1f1b", "interleaved_1f1b", "zb_v", "dualpipe"], 4, 8, EQUAL | {"forward": [1, 1, 3, 1]})
    assert {row.refused for row in rows} == {None}
    assert min(row.cost for row in rows) >= 8 * 3
    even = compare(["1f1b", "interleaved_1f1b", "zb_v", "dualpipe"], 4, 8, EQUAL)
    assert {row.name for row in rows if row.cost > 1.2 * {e.name: e.cost for e in even}[row.name]} == {
        "1f1b", "interleaved_1f1b", "zb_v", "dualpipe",
    }  # fmt: skip


def test_all_are_the_synchronous_ones_that_need_no_file():
    assert {row.name for row in compare(["all"], 4, 8, EQUAL)} == set(EVERY)
    assert compare(["all", *ASYNCHRONOUS], 4, 8, EQUAL)[0].name in ASYNCHRONOUS
    assert [row.name for row in compare(["gpipe", "gpipe"], 4, 8, EQUAL)] == ["gpipe"]


def test_the_table_has_a_line_for_each_and_the_reasons():
    rows = compare(["1f1b", "zb_h1", "chimera", "gpipe"], 3, 4, EQUAL, memory_limit=3)
    lines = table(rows).splitlines()
    assert [line.split()[0] for line in lines] == ["schedule", "zb_h1", "1f1b", "chimera", "gpipe"]
    assert lines[1].split()[1:] == ["14", "0.1429", "0.1429", "3", "16", "1", "1"]
    assert lines[3].endswith("-  pipeline.ranks must be even: 2, 4, 6, ...")
    assert lines[4].endswith("-  keeps 4 activations, more than 3")


def test_what_a_program_asks_for():
    assert features(build("1f1b", 2, 4)) == features(build("hanayo", 2, 4)) == []
    assert features(build("zb_v", 2, 4)) == [SPLIT]
    assert features(build("chimera", 2, 4)) == [COPIES]
    assert features(build("dualpipe", 2, 4)) == [SPLIT, COPIES]
    assert features(build("pipedream", 2, 4)) == features(build("pipedream_2bw", 2, 4)) == [VERSIONS]


# --- docs/schedules.md -----------------------------------------------------------------------------------------


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "schedules.md"
    assert page.read_text() == guide(), "python -m engine.plan.views.guide > docs/schedules.md"


def test_the_page_has_every_schedule_with_its_grid():
    assert set(ADVICE) == {*EVERY, *ASYNCHRONOUS}
    page = guide()
    for name in ADVICE:
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert section.count("\nrank ") == 4
        assert section.split("* Defined for: ")[1].startswith(ADVICE[name].constraints)
        assert re.search(r"20\d\d|arXiv|SC'2\d|Every pipeline is judged|DualPipe repository", section), "no source"


@pytest.mark.parametrize("name", [*EVERY, *ASYNCHRONOUS])
def test_the_constraints_on_the_page_are_those_of_the_code(name):
    refused = any(SCHEDULES[name].complaint(p, m, {}) for p in range(1, 6) for m in range(1, 13))
    assert refused != ADVICE[name].constraints.startswith(ANY)
