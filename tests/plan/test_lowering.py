"""Lowered programs list each message once, posted in time and in the sender's order."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import PLAIN, executed, scheduled

from engine.plan.actions import COMPUTE, RECVS, SENDS, Action, Op, Placement, Program
from engine.plan.lowering import channels, lower
from engine.plan.schedules import build
from engine.plan.simulate import compute_only
from engine.plan.verify import verify
from engine.plan.views.text import from_csv, to_csv

programs = st.one_of(scheduled((*PLAIN, "forward_only")), executed())


def rows(program: Program) -> list[list[Action]]:
    return [list(program.actions(r)) for r in range(program.ranks)]


def test_a_lowered_program_drawn_out():
    lowered = lower(build("1f1b", 2, 2), reduce=True, step=True)
    assert to_csv(lowered) == (
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1,0REDUCE_GRAD,0STEP\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1STEP\n"
    )


@given(programs)
def test_computations_are_left_as_they_were(program):
    assert compute_only(lower(program, reduce=True, step=True)) == program


def endpoints(action: Action, placement: Placement) -> tuple[int, int, str]:
    """The channel of a SEND or RECV."""
    kind = action.op.name[-1]
    far = action.stage + {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}[action.op]
    here, there = placement.rank(action.stage, action.microbatch), placement.rank(far, action.microbatch)
    return (here, there, kind) if action.op in SENDS else (there, here, kind)


@given(programs)
def test_the_kth_send_of_a_channel_is_its_kth_receive(program):
    """C002: nothing relies on a backend that is lenient about order, and nothing is left over."""
    lowered = lower(program, reduce=False, step=False)
    sent, got = {}, {}
    for a in itertools.chain(*rows(lowered)):
        if a.op in SENDS:
            far = a.stage + (1 if a.op is Op.SEND_F else -1)
            sent.setdefault(endpoints(a, program.placement), []).append((far, a.microbatch))
        if a.op in RECVS:
            got.setdefault(endpoints(a, program.placement), []).append((a.stage, a.microbatch))
    assert sent == got
    assert sorted(sent) == channels(program) == channels(lowered)
    assert all(a != b for a, b, _ in sent)


@given(scheduled((*PLAIN, "forward_only")))
def test_a_receive_is_posted_one_computation_ahead(program):
    """C003: no more than one, so buffers are bounded by what is in flight; no less, so it overlaps a computation."""
    for row in rows(lower(program, reduce=False, step=False)):
        order = [a for a in row if a.op in COMPUTE]
        for at, action in enumerate(row):
            if action.op not in RECVS:
                continue
            users = (Op.F,) if action.op is Op.RECV_F else (Op.B,)
            (user,) = [k for k, a in enumerate(order) if a.op in users and a.microbatch == action.microbatch]
            before = sum(a.op in COMPUTE for a in row[:at])
            assert before == max(user - 1, 0)


@given(programs)
def test_a_receive_is_posted_early_enough_on_any_placement(program):
    for row in rows(lower(program, reduce=False, step=False)):
        order = [a for a in row if a.op in COMPUTE]
        for at, action in enumerate(row):
            if action.op in RECVS:
                users = (Op.F,) if action.op is Op.RECV_F else (Op.B, Op.I)
                key = (action.stage, action.microbatch)
                (user,) = [k for k, a in enumerate(order) if a.op in users and (a.stage, a.microbatch) == key]
                assert sum(a.op in COMPUTE for a in row[:at]) <= max(user - 1, 0)


@given(programs)
def test_a_send_follows_what_made_it(program):
    for row in rows(lower(program, reduce=True, step=True)):
        for before, action in itertools.pairwise(row):
            if action.op in SENDS:
                made = (Op.F,) if action.op is Op.SEND_F else (Op.B, Op.I)
                assert before.op in made
                assert (before.stage, before.microbatch) == (action.stage, action.microbatch)


@given(st.one_of(scheduled(), executed()))
def test_reduce_follows_the_last_backward_and_step_ends_the_row(program):
    lowered = lower(program, reduce=True, step=True)
    for rank, row in enumerate(rows(lowered)):
        stages = program.placement.stages_of(rank)
        assert [a.stage for a in row if a.op is Op.REDUCE] == stages[::-1]  # one order, whatever the program is
        if stages:
            assert row[-1] == Action(stages[0], Op.STEP)
        visited = {a.stage for a in row if a.op in (Op.B, Op.W)}
        for at, action in enumerate(row):
            backward = [k for k, a in enumerate(row) if a.op in (Op.B, Op.W) and a.stage >= action.stage]
            if action.op is Op.REDUCE and visited >= {s for s in stages if s >= action.stage}:
                between = row[backward[-1] + 1 : at]
                assert backward[-1] < at
                assert all(a.op in (Op.SEND_B, Op.REDUCE) for a in between)


@given(programs)
def test_without_reduce_and_step_there_are_none(program):
    assert not {a.op for row in rows(lower(program, reduce=False, step=False)) for a in row} & {Op.REDUCE, Op.STEP}


@given(st.one_of(scheduled(), executed()))
def test_gathers_of_a_ranks_stages_follow_its_step_the_first_stage_first(program):
    lowered = lower(program, reduce=True, step=True, gather=True)
    verify(lowered, ascending=False)
    for rank, row in enumerate(rows(lowered)):
        stages = program.placement.stages_of(rank)
        gathers = [Action(stage, Op.GATHER) for stage in stages]
        assert row[len(row) - len(stages) :] == gathers
        assert not stages or row[-len(stages) - 1] == Action(stages[0], Op.STEP)
    without = [[a for a in row if a.op is not Op.GATHER] for row in rows(lowered)]
    assert without == rows(lower(program, reduce=True, step=True))


def test_asynchronous_updates_are_not_gathered():
    with pytest.raises(ValueError, match="its updates cannot be divided"):
        lower(build("pipedream", 2, 3), reduce=True, step=True, gather=True)


def test_sends_of_an_overlapped_pair_come_after_the_pair():
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
    lowered = lower(from_csv(text), reduce=False, step=False)
    assert to_csv(lowered).splitlines()[0] == ("0RECV_B0,0F0,0SEND_F0,0RECV_B1,(0F1;0B0)OVERLAP_F_B,0SEND_F1,0B1")


def test_a_receive_moves_ahead_where_the_sender_sends_early():
    """Rank 0 sends micro-batch 1 first, rank 1 needs it last: it is received first all the same."""
    lowered = lower(from_csv("0F1,0F0\n1F0,1F1\n"), reduce=False, step=False)
    assert to_csv(lowered) == "0F1,0SEND_F1,0F0,0SEND_F0\n1RECV_F1,1RECV_F0,1F0,1F1\n"
    verify(lowered)


def test_stages_on_one_rank_exchange_no_message():
    placement = Placement(2, ((0, 1, 1, 0),))  # V: first and last stage on rank 0, the turn on rank 1
    program = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", placement)
    lowered = lower(program, reduce=False, step=False)
    assert channels(program) == [(0, 1, "B"), (0, 1, "F"), (1, 0, "B"), (1, 0, "F")]
    assert to_csv(lowered) == (
        "3RECV_F0,0F0,0SEND_F0,3F0,0RECV_B0,3B0,3SEND_B0,0B0\n1RECV_F0,1F0,2RECV_B0,2F0,2SEND_F0,2B0,1B0,1SEND_B0\n"
    )


def test_a_copy_that_no_microbatch_visits_is_reduced_at_the_end():
    program = from_csv("0F0,0B0\n1F0,1B0\n", Placement(2, ((0, 1), (1, 0)), (0,)))
    lowered = lower(program, reduce=True, step=True)
    assert [row.rsplit(",", 4)[1:] for row in to_csv(lowered).splitlines()] == [
        ["0B0", "1REDUCE_GRAD", "0REDUCE_GRAD", "0STEP"],
        ["1SEND_B0", "1REDUCE_GRAD", "0REDUCE_GRAD", "0STEP"],
    ]
    verify(lowered)


def test_lowering_twice_is_refused():
    with pytest.raises(ValueError, match="lowered already"):
        lower(lower(build("gpipe", 2, 2), reduce=False, step=False), reduce=False, step=False)


def test_one_rank_needs_no_channel():
    assert channels(build("1f1b", 1, 3)) == []
    assert channels(build("forward_only", 3, 1)) == [(0, 1, "F"), (1, 2, "F")]
