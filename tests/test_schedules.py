"""Each schedule is the published one, for every P and M."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import SYNCHRONOUS

from engine.plan.actions import Op, Placement
from engine.plan.schedules import SCHEDULES, build, largest_legal_microbatches, offered_schedules
from engine.plan.schedules.registry import ScheduleInfo
from engine.plan.verify import peak_in_flight, verify

sizes = st.tuples(st.integers(1, 9), st.integers(1, 12))
each = pytest.mark.parametrize("name", [*SYNCHRONOUS, "forward_only"])


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
    assert offered_schedules() == sorted(SYNCHRONOUS)
    assert "forward_only" in SCHEDULES


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpip'.*1f1b, gpipe, naive$"):
        build("gpip", 2, 4)


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
