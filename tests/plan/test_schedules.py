"""Each schedule is the published one, for every P and M."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import EVERY, PLAIN, scheduled

from engine.plan.actions import Op, Placement, Program
from engine.plan.lowering import lower
from engine.plan.schedules import SCHEDULES, build, evaluation, largest_legal_microbatches, offered_schedules
from engine.plan.schedules.placements import both_ways, round_robin, vee, zigzag
from engine.plan.schedules.registry import ScheduleInfo
from engine.plan.verify import peak_in_flight, verify

sizes = st.tuples(st.integers(1, 9), st.integers(1, 12))
each = pytest.mark.parametrize("name", [*PLAIN, "forward_only"])


def row(name: str, ranks: int, microbatches: int, rank: int) -> str:
    return " ".join(f"{a.op.name}{a.microbatch}" for a in build(name, ranks, microbatches).actions(rank))


@each
@given(sizes)
def test_every_size_is_valid_and_on_a_linear_placement(name, size):
    ranks, microbatches = size
    program = build(name, ranks, microbatches)
    verify(program)
    assert (program.name, program.placement, program.microbatches) == (name, Placement.linear(ranks), microbatches)
    assert {a.op for r in range(ranks) for a in program.actions(r)} <= {Op.F, Op.B}


def test_the_published_row_of_1f1b():
    assert row("1f1b", 4, 8, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("naive", 0, "F0 B0 F1 B1"),
        ("naive", 2, "F0 B0 F1 B1"),
        ("gpipe", 1, "F0 F1 B0 B1"),
        ("1f1b", 0, "F0 F1 B0 B1"),  # fewer micro-batches than the warm-up would take
        ("1f1b", 2, "F0 B0 F1 B1"),
        ("forward_only", 1, "F0 F1"),
    ],
)
def test_fewer_microbatches_than_ranks(name, rank, expected):
    assert row(name, 3, 2, rank) == expected


@given(sizes)
def test_peaks_in_flight(size):
    ranks, m = size
    assert peak_in_flight(build("naive", ranks, m)) == [1] * ranks
    assert peak_in_flight(build("gpipe", ranks, m)) == [m] * ranks
    assert peak_in_flight(build("1f1b", ranks, m)) == [min(ranks - r, m) for r in range(ranks)]
    assert peak_in_flight(build("forward_only", ranks, m)) == [0] * ranks


def test_evaluation_is_not_a_choice_for_training():
    assert set(SCHEDULES) - set(offered_schedules()) == {"forward_only"}
    assert set(PLAIN) < set(EVERY) < set(offered_schedules())


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpip'.*1f1b, chimera, csv, .*, zb_v$"):
        build("gpip", 2, 4)


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.slow(keep=21)
def test_every_size_is_proven_or_refused_with_a_sentence(name, ranks):
    """Also with its communication; and where a size is refused, one of the sizes that the sentence names is not."""
    for microbatches in range(1, 14):
        if complaint := SCHEDULES[name].complaint(ranks, microbatches, {}):
            assert name in ("chimera", "dualpipe", "dualpipe_v")
            named = [int(n) for n in re.findall(r"\d+(?=,)", complaint)]
            sizes = [(n, microbatches) if "ranks must" in complaint else (ranks, n) for n in named]
            assert any(SCHEDULES[name].complaint(p, m, {}) is None for p, m in sizes) or "ranks must" in complaint
            with pytest.raises(ValueError, match=rf"{name} is not defined for pipeline.ranks={ranks}"):
                build(name, ranks, microbatches)
            continue
        program = build(name, ranks, microbatches)
        assert (program.name, program.ranks, program.microbatches) == (name, ranks, microbatches)
        verify(program)
        verify(lower(program, reduce=True, step=True))


@pytest.mark.parametrize(
    ("name", "option"), [("interleaved_1f1b", "chunks"), ("looped_bfs", "chunks"), ("hanayo", "waves")]
)
@given(sizes, st.integers(1, 4))
def test_any_number_of_chunks(name, option, size, chunks):
    program = build(name, *size, {option: chunks})
    assert program.stages == size[0] * chunks * (2 if option == "waves" else 1)
    verify(program)
    verify(lower(program, reduce=True, step=True))


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
@pytest.mark.parametrize(
    ("name", "option"), [("interleaved_1f1b", "chunks"), ("looped_bfs", "chunks"), ("hanayo", "waves")]
)
def test_impossible_numbers_of_chunks_are_refused(name, option, value):
    with pytest.raises(ValueError, match=rf"schedule.{option}={value!r} is not possible: .* 1 or more"):
        build(name, 2, 4, {option: value})


@given(sizes)
def test_one_chunk_is_the_schedule_without_chunks(size):
    """A warm-up twice as long apart: interleaving keeps more in flight to hide the way of a message."""
    bfs, gpipe = build("looped_bfs", *size, {"chunks": 1}), build("gpipe", *size)
    assert all(map(np.array_equal, bfs.rows, gpipe.rows))
    interleaved = build("interleaved_1f1b", *size, {"chunks": 1})
    assert peak_in_flight(interleaved) == [min(2 * (size[0] - 1 - r) + 1, size[1]) for r in range(size[0])]


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "rank", "expected"),
    [
        ("interleaved_1f1b", 2, 4, 0, "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"),
        ("zb_h1", 4, 8, 2, "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7"),
        ("zb_h2", 2, 4, 0, "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"),
    ],
)
def test_published_rows(name, ranks, microbatches, rank, expected):
    program = build(name, ranks, microbatches)
    one = len(program.placement.stages_of(rank)) == 1
    assert " ".join(str(a)[len(str(rank)) * one :] for a in program.actions(rank)) == expected


def test_placements():
    assert round_robin(3, 2) == Placement(3, ((0, 1, 2, 0, 1, 2),))
    assert vee(3) == Placement(3, ((0, 1, 2, 2, 1, 0),))
    assert zigzag(2, 2) == Placement(2, ((0, 1, 1, 0, 0, 1, 1, 0),))
    assert both_ways(4, [0, 1]) == Placement(4, ((0, 1, 2, 3), (3, 2, 1, 0)), (0, 1))
    dualpipe, chimera = build("dualpipe", 2, 4).placement, build("chimera", 4, 8).placement
    assert dualpipe.direction == (0, 0, 1, 1)
    assert chimera.direction == (0, 0, 1, 1, 0, 0, 1, 1)
    assert build("hanayo", 3, 3, {"waves": 2}).placement.rank_of[0] == (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)


@given(scheduled(), st.integers(1, 6))
def test_evaluation_uses_every_placement_and_needs_few_messages_in_a_channel(program, microbatches):
    """Nothing comes back in evaluation, so a sender may have to wait until what it sent before is taken in."""
    forward = evaluation(program.placement, microbatches)
    verify(forward)
    verify(lower(forward, reduce=False, step=False))
    assert len(forward) == program.stages * microbatches
    assert ends_with_messages_on_a_channel(forward, 2 * program.stages // program.ranks)


def ends_with_messages_on_a_channel(program: Program, most: int) -> bool:
    """Execute a forward-only program where a rank that has sent `most` messages waits until one is taken in."""
    place, done, under_way = program.placement.rank_of[0], set(), Counter()
    rows, moved = [list(program.actions(r)) for r in range(program.ranks)], True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while row:
                stage, _, m, _ = row[0]
                far = place[stage + 1] if stage + 1 < program.stages else rank
                full = far != rank and under_way[rank, far] == most
                if full or (stage and (stage - 1, m) not in done):
                    break
                if stage:
                    under_way[place[stage - 1], rank] -= place[stage - 1] != rank
                under_way[rank, far] += far != rank
                done.add((stage, m))
                del row[0]
                moved = True
    return not any(rows)


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match=r"1f1b has no option 'chunks'"):
        build("1f1b", 2, 4, {"chunks": 2})


@pytest.mark.parametrize(("ranks", "microbatches"), [(0, 4), (-1, 4), (2, 0), (2, -3), (True, 1), (2, 1.5), ("2", 4)])
@pytest.mark.parametrize("ask", [build, largest_legal_microbatches])
def test_impossible_sizes_are_refused(ask, ranks, microbatches):
    with pytest.raises(ValueError, match=r"pipeline\.(ranks|microbatches)=.* whole number, 1 or more"):
        ask("gpipe", ranks, microbatches)


@each
@given(sizes)
def test_these_schedules_are_defined_for_every_number_of_microbatches(name, size):
    assert largest_legal_microbatches(name, *size) == size[1]


def _multiple_of_ranks(ranks: int, microbatches: int, *, chunks: int = 2) -> str | None:
    return None if microbatches % ranks == 0 else f"microbatches must be a multiple of {ranks} with {chunks} chunks"


def test_a_schedule_that_is_not_defined_everywhere_says_where(monkeypatch):
    gpipe = SCHEDULES["gpipe"]
    picky = ScheduleInfo(
        "picky", "", lambda ranks, m, chunks: gpipe.function(ranks, m), {"chunks": 2}, True, _multiple_of_ranks
    )
    monkeypatch.setitem(SCHEDULES, "picky", picky)
    with pytest.raises(ValueError, match=r"picky.*ranks=4.*microbatches=6.*multiple of 4 with 3 chunks"):
        build("picky", 4, 6, {"chunks": 3})
    assert build("picky", 4, 8, {"chunks": 3}).microbatches == 8
    assert largest_legal_microbatches("picky", 4, 11) == 8
    assert largest_legal_microbatches("picky", 4, 3) is None
    with pytest.raises(ValueError, match=r"no option 'chnks'; its options: chunks"):
        build("picky", 4, 8, {"chnks": 3})
