"""Asynchronous programs: which weights a micro-batch reads, how old they are, what is refused, what they cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.actions import Action, Op, Program
from engine.plan.lowering import lower
from engine.plan.schedules import SCHEDULES, build
from engine.plan.simulate import Costs, compute_only, simulate
from engine.plan.steady import long_run, steady_state
from engine.plan.updates import peak_versions, read_versions, staleness
from engine.plan.verify import InvalidProgram, peak_in_flight, verify
from engine.plan.views.text import from_csv, to_csv

ranks_and_microbatches = st.tuples(st.integers(1, 7), st.integers(1, 20))
costs = st.floats(0.1, 10)
EQUAL = {"forward": 1, "input_backward": 1, "weight_backward": 1}


def two_buffers(ranks: int, updates: list[int]) -> Program:
    stream = SCHEDULES["pipedream_2bw"].stream
    assert stream is not None
    return stream.build(ranks, updates)


def proven(program: Program) -> Program:
    verify(program)
    for reduce in (False, True):
        verify(lower(program, reduce=reduce, step=True))
    return program


def test_a_program_drawn_out():
    lowered = lower(build("pipedream", 2, 3), reduce=True, step=True)
    assert to_csv(lowered) == (
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0B0,0REDUCE_GRAD,0STEP0,0RECV_B1,0F2,0SEND_F2,0RECV_B2,"
        "0B1,0REDUCE_GRAD,0STEP1,0B2,0REDUCE_GRAD,0STEP2\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1REDUCE_GRAD,1STEP0,1F1,1RECV_F2,1B1,1SEND_B1,1REDUCE_GRAD,1STEP1,"
        "1F2,1B2,1SEND_B2,1REDUCE_GRAD,1STEP2\n"
    )


@given(ranks_and_microbatches)
def test_pipedream_reads_weights_that_are_p_minus_1_minus_s_updates_old(size):
    """Narayanan et al., SOSP'19: P-s in flight and P-s versions on stage s, once the pipeline is full."""
    p, m = size
    program = proven(build("pipedream", p, m))
    expected = [[min(k, p - 1 - s) for k in range(m)] for s in range(p)]
    assert staleness(program).tolist() == expected
    assert peak_in_flight(program) == [min(p - s, m) for s in range(p)]
    assert build("1f1b", p, m).rows[0].tolist() == compute_only(program).rows[0].tolist()
    if m > 2 * p:
        assert peak_versions(program) == [p - s for s in range(p)]


@given(ranks_and_microbatches)
def test_vertical_sync_reads_one_version_on_every_stage(size):
    p, m = size
    program = proven(build("pipedream", p, m, {"vertical_sync": True}))
    assert read_versions(program).tolist() == [[max(k - (p - 1), 0) for k in range(m)]] * p
    if m > 2 * p:
        assert peak_versions(program) == [p] * p


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 6))
def test_two_buffers_are_two_and_one_update_old(p, more, count):
    """arXiv 2006.09503: micro-batch k (from 1) reads version max(floor((k-1)/M)-1, 0)."""
    m = p + more
    program = proven(two_buffers(p, [m] * count))
    expected = [max((k - 1) // m - 1, 0) for k in range(1, m * count + 1)]
    assert read_versions(program).tolist() == [expected] * p
    assert peak_versions(program) == [min(count, 2)] * p


@given(st.integers(1, 5), st.lists(st.integers(1, 7), min_size=1, max_size=8))
@pytest.mark.slow
def test_updates_of_any_size_are_proven(p, updates):
    """The end of an epoch brings short ones, in any place."""
    program = proven(two_buffers(p, updates))
    assert (staleness(program)[0] >= 0).all()
    assert (staleness(program) == staleness(program)[0]).all()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_v", "dualpipe"])
def test_synchronous_programs_have_no_lag_and_one_version(name):
    """C040."""
    program = build(name, 4, 8)
    assert not program.asynchronous
    assert not staleness(program).any()
    assert peak_versions(program) == [1] * 4


@pytest.mark.parametrize(
    ("rows", "action", "blocker", "sentence"),
    [
        ("0F0,0F1,0STEP0,0B0,0B1,0STEP1\n", "0STEP0", "0B0", "must follow 0B0, but comes after 0 backwards"),
        ("0F0,0F1,0B0,0B1,0STEP0,0STEP1\n", "0STEP0", "0B0", "must follow 0B0, but comes after 2 backwards"),
        ("0F0,0B0,0STEP0,0F1,0B1\n", "0B1", "STEP", "in no update"),
        ("0F0,0B0,0STEP0,0STEP0\n", "0STEP0", "0STEP0", "taken once, in order"),
        ("0F0,0F1,0B0,0B1,0STEP1,0STEP0\n", "0STEP0", "0STEP1", "taken once, in order"),
        ("0F0,0F1,0B0,0B1,0STEP1\n1F0,1B0,1STEP0,1F1,1B1,1STEP1\n", "1STEP0", "no update", "of the other stages"),
        ("0F0,0B0,0STEP0,0F1,0B1,0STEP1\n1F0,1B0,1F1,1B1,1STEP1\n", "1B0", "1STEP0", "every stage takes every update"),
        ("0F0,0B0,0REDUCE_GRAD,0STEP0,0F1,0B1,0STEP1\n", "0STEP1", "0REDUCE_GRAD", "one REDUCE"),
        ("0F0,0REDUCE_GRAD,0B0,0STEP0\n", "0REDUCE_GRAD", "0STEP", "one REDUCE"),
        ("0F0,0B0,0STEP0,0REDUCE_GRAD\n", "0STEP0", "0REDUCE_GRAD", "one REDUCE"),
    ],
)
def test_what_is_wrong_with_updates_is_said(rows, action, blocker, sentence):
    with pytest.raises(InvalidProgram, match="\\^") as refused:
        verify(from_csv(rows))
    assert (refused.value.action, refused.value.blocker) == (action, blocker)
    assert sentence in str(refused.value)


def test_weights_of_the_future_are_refused():
    program = build("pipedream", 2, 4, {"vertical_sync": True})
    assert program.versions is not None
    program.versions[1, 2] = 3
    with pytest.raises(InvalidProgram, match="1F2 would read version 3 of the weights; 2 updates of its stage come"):
        verify(program)


@given(st.tuples(st.integers(2, 6), st.integers(1, 9)), st.data())
def test_a_program_without_one_of_its_updates_is_refused(size, data):
    program = build("pipedream", *size)
    rank = data.draw(st.integers(0, size[0] - 1))
    row = program.rows[rank]
    gone = data.draw(st.sampled_from(np.flatnonzero((row >> 56) == Op.STEP).tolist()))
    rows = [list(program.actions(r)) for r in range(size[0])]
    del rows[rank][gone]
    with pytest.raises(InvalidProgram):
        verify(Program.of("cut", program.placement, program.microbatches, rows))


def test_a_written_program_reads_back():
    program = build("pipedream", 3, 5)
    assert from_csv(to_csv(program), name="pipedream") == program
    assert Action(2, Op.STEP, 4) in list(program.actions(2))
    assert "STEP" not in to_csv(program, for_torch=True)


@given(st.integers(1, 6), st.tuples(costs, costs, costs))
def test_there_is_no_bubble_in_the_steady_state(p, parts):
    parts = dict(zip(EQUAL, parts, strict=True))
    for name, m in (("pipedream", 1), ("pipedream_2bw", p)):
        found = long_run(name, p, m, parts, {})
        assert found.steady.bubble == pytest.approx(0, abs=1e-9)
        assert found.steady.period == pytest.approx(sum(parts.values()))
    assert found.staleness == [1] * p
    assert found.versions == [2] * p


def test_the_steady_state_of_unequal_stages_is_the_slowest_ones():
    slow = EQUAL | {"forward": [1, 3, 1, 1]}
    found = long_run("pipedream", 4, 8, slow, {})
    assert found.steady.period == pytest.approx(5)
    assert found.steady.bubble == pytest.approx(1 - (3 + 5 + 3 + 3) / 20)


def test_transfers_that_do_not_fit_into_what_is_in_flight_show():
    """A round trip of P forwards and backwards and 2(P-1) messages brings P micro-batches back."""
    found = long_run("pipedream", 4, 8, EQUAL | {"transfer": 1}, {})
    assert found.steady.period == pytest.approx(3 + 2 * 3 / 4)


def test_the_fill_of_a_short_program_is_not_its_steady_state():
    program = build("pipedream", 2, 5)
    timeline = simulate(program, Costs.from_settings(EQUAL, program.placement, 5))
    assert steady_state(program, timeline).bubble == pytest.approx(0)
    assert float(timeline.end.max()) == 3 * 5 + 3
