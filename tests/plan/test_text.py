"""Programs as text: what we write, torch.distributed.pipelining reads, and the other way round."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import EVERY, executed, scheduled
from torch.distributed.pipelining import schedules as peer

from engine.plan.actions import Action, Op, Placement, Program
from engine.plan.features import SPLIT, features
from engine.plan.lowering import lower
from engine.plan.schedules import SCHEDULES, build
from engine.plan.simulate import Costs, simulate
from engine.plan.timeline import Kind, Span, Timeline
from engine.plan.verify import verify
from engine.plan.views.grid import grid
from engine.plan.views.text import cells, from_csv, parse_action, parse_cell, to_csv

with_microbatch = st.sampled_from([op for op in Op if op not in (Op.REDUCE, Op.GATHER)])
actions = st.one_of(
    st.tuples(st.integers(0, 2**23 - 1), with_microbatch, st.integers(0, 2**32 - 2)).map(lambda a: Action(*a)),
    st.tuples(st.integers(0, 99), st.sampled_from([Op.REDUCE, Op.STEP, Op.GATHER])).map(lambda a: Action(*a)),
)


@given(actions)
def test_an_action_survives_printing(action):
    assert parse_action(str(action)) == action
    assert parse_cell(f" {action} ") == (action,)


@given(actions.filter(lambda a: a.op not in (Op.STEP, Op.GATHER)))
def test_torch_reads_our_actions_and_we_read_its(action):
    theirs = peer._Action.from_str(str(action))
    assert str(theirs) == str(action)
    assert parse_action(str(theirs)) == action


def test_an_overlapped_pair_is_two_actions_in_order():
    cell = "(0F7;7B3)OVERLAP_F_B"
    assert str(peer._Action.from_str(cell)) == cell
    assert parse_cell(cell) == (Action(0, Op.F, 7, fused=True), Action(7, Op.B, 3))
    program = from_csv(f"0F0,{cell.replace('7', '0').replace('3', '0')}\n", Placement.linear(1))
    assert cells(program, 0) == ["0F0", "(0F0;0B0)OVERLAP_F_B"]


@pytest.mark.parametrize("cell", ["", "  ", "0UNSHARD", "3RESHARD"])
def test_cells_without_an_action(cell):
    assert parse_cell(cell) == ()


@pytest.mark.parametrize(
    "text",
    [
        "2F0&1B3",
        "2F",
        "F0",
        "2X0",
        "-1F0",
        "2F0,1B0",
        "2SEND_F",
        "0REDUCE_GRAD3",
        "0UNSHARD",
        "2f0",
        "2F0.5",
        "\uff12F0",
    ],
)
def test_what_is_no_action_is_refused_whole(text):
    with pytest.raises(ValueError, match="is not an action"):
        parse_action(text)


def test_numbers_that_do_not_fit_are_refused():
    for text in ("8388608F0", "0F4294967295"):
        with pytest.raises(ValueError, match="out of range"):
            parse_action(text)


@pytest.mark.parametrize(
    "cell", ["(0F0)OVERLAP_F_B", "(0F0;0SEND_F0)OVERLAP_F_B", "(0F0;0B0;0W0)OVERLAP_F_B", "(0F0;0B0)"]
)
def test_what_is_no_pair_is_refused(cell):
    with pytest.raises(ValueError, match=r"overlaps something|is not an action"):
        parse_cell(cell)


def test_a_refusal_says_where_in_the_file():
    with pytest.raises(ValueError, match=r"row 1, cell 2: '1Q0' is not an action"):
        from_csv("0F0,0B0\n1F0,,1Q0\n")


@given(st.one_of(scheduled(), executed()), st.booleans())
def test_a_program_survives_csv(program, lowered):
    program = lower(program, reduce=True, step=True, gather=True) if lowered else program
    assert from_csv(to_csv(program), program.placement, program.name) == program


@given(st.one_of(scheduled(), executed()))
def test_the_placement_is_found_out(program):
    """Up to the order of the two directions, which has no meaning."""
    again = from_csv(to_csv(program))
    assert again.placement.rank_table(program.microbatches).tolist() == (
        program.placement.rank_table(program.microbatches).tolist()
    )
    verify(again)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n\n", "the program is empty"),
        ("0F0,2F0\n", "stage 1 is on no rank, although there is a stage 2"),
        ("0F0,1F1\n1F0,0F1,2F2\n0F2,1F2\n", "3 different ways"),
        ("0F0,0F4000000000\n", "is a number mistyped"),
    ],
)
def test_programs_without_a_placement_are_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        from_csv(text)


def test_exports_for_torch_leave_out_what_torch_has_not():
    lowered = lower(build("gpipe", 2, 1), reduce=True, step=True, gather=True)
    for word in ("STEP", "GATHER"):
        assert word not in to_csv(lowered, for_torch=True)
        assert word in to_csv(lowered)
    placement = Placement(2, ((0, 1), (1, 0)), (0, 1))
    both = from_csv("0F0,1F1\n1F0,0F1\n", placement)
    with pytest.raises(ValueError, match="keeps 2 copies of each stage"):
        to_csv(both, for_torch=True)


# --- grids ---------------------------------------------------------------------------------------


def drawn(name: str, ranks: int, microbatches: int, width: int = 120, **costs) -> str:
    program = build(name, ranks, microbatches)
    return grid(simulate(program, Costs.from_settings(costs, program.placement, microbatches)), width=width)


EQUAL = {"input_backward": 0.5, "weight_backward": 0.5}


@pytest.mark.parametrize("name", [*EVERY, "forward_only"])
def test_the_drawing_in_a_docstring_is_the_schedule(name):
    """The docstring says the sizes; F, I and W take equally long where a backward is split, F and B where it is not."""
    text = SCHEDULES[name].function.__doc__ or ""
    ranks, microbatches = (int(re.search(rf"{size}=(\d+)", text)[1]) for size in "PM")
    split = SPLIT in features(build(name, ranks, microbatches))
    drawing = [line.strip() for line in text.splitlines()]
    for line in drawn(name, ranks, microbatches, **({} if split else EQUAL)).splitlines():
        assert line.rstrip() in drawing


def test_a_long_action_is_continued():
    assert drawn("gpipe", 2, 1) == "rank 0 | F0 .  .  .  B0 -\nrank 1 | .  F0 B0 -  .  ."


def test_a_rank_with_several_stages_names_them():
    program = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    picture = grid(simulate(program, Costs.from_settings(EQUAL | {"forward": 1}, program.placement, 1)))
    assert picture.splitlines()[0] == "rank 0 | 0F0 .   .   3F0 3B0 .   .   0B0"


@given(st.one_of(scheduled(), executed()), st.integers(40, 120), st.data())
def test_grids_keep_to_their_width_and_point_at_the_mark(program, width, data):
    rank = data.draw(st.sampled_from([r for r in range(program.ranks) if len(program.rows[r])]))
    index = data.draw(st.integers(0, len(program.rows[rank]) - 1))
    timeline = simulate(program, Costs.from_settings({}, program.placement, program.microbatches))
    for what in (program, timeline):
        lines = grid(what, (rank, index), width).splitlines()
        assert max(map(len, lines)) <= width
        assert len([line for line in lines if line.startswith("rank")]) == program.ranks
        (arrow,) = [k for k, line in enumerate(lines) if line.strip() == "^"]
        assert lines[arrow - 1].startswith(f"rank {rank} |")
        if what is program:
            cell = lines[arrow - 1][lines[arrow].index("^") :].split()[0].rstrip("&")
            assert cell == str(Action.unpack(program.rows[rank][index]))


def test_measured_time_is_drawn_from_where_its_window_begins():
    spans = [Span(0, Kind.F, 0, 0, 10**15, 10**15 + 7), Span(0, Kind.B, 0, 0, 10**15 + 7, 10**15 + 21)]
    timeline = Timeline.of(spans, [[10**15, 10**15 + 28]], measured=True)
    assert grid(timeline) == "rank 0 | F0 B0 -  ."


def test_many_ranks_are_shown_around_the_mark():
    lines = grid(build("gpipe", 100, 2), (50, 1)).splitlines()
    assert any(line.startswith("rank 50 |") for line in lines)
    assert lines[-1] == "... and 68 more ranks"


def test_too_much_time_for_the_width_is_said():
    picture = drawn("naive", 4, 8, width=60)
    assert picture.splitlines()[-1].startswith("(a column is 5.6")
    assert "a column" not in drawn("1f1b", 4, 8)


def test_nothing_to_draw():
    assert grid(Timeline.of([], [[0.0, 0.0]])) == "(nothing takes any time)"
    assert grid(Program.of("none", Placement.linear(1), 1, [[]])) == "rank 0 |"
