"""Actions pack and unpack without loss, one by one and many at once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import executed, scheduled

from engine.plan.actions import NO_MICROBATCH, Action, Op, Placement, Program, pack, unpack
from engine.plan.timeline import COMPUTE_KINDS, Kind, Span, Timeline

actions = st.builds(
    Action,
    stage=st.integers(0, 2**23 - 1),
    op=st.sampled_from(Op),
    microbatch=st.integers(NO_MICROBATCH, 2**32 - 2),
    fused=st.booleans(),
)


@given(actions)
def test_an_action_survives_packing(action):
    assert Action.unpack(action.pack()) == action
    assert 0 <= action.pack() < 2**63


@given(st.lists(actions, min_size=1))
def test_many_actions_pack_as_one_by_one(some):
    row = np.array([a.pack() for a in some], dtype=np.int64)
    fields = unpack(row)
    assert [Action(s, Op(o), m, bool(f)) for o, s, m, f in zip(*(c.tolist() for c in fields), strict=True)] == some
    plain = [a._replace(fused=False) for a in some]
    assert pack(fields.op, fields.stage, fields.microbatch).tolist() == [a.pack() for a in plain]


def test_actions_print_as_torch_prints_them():
    named = [Action(2, Op.F, 0), Action(1, Op.SEND_F, 3), Action(3, Op.I, 2), Action(0, Op.REDUCE), Action(0, Op.STEP)]
    assert [str(a) for a in named] == ["2F0", "1SEND_F3", "3I2", "0REDUCE_GRAD", "0STEP"]
    assert str(Action(1, Op.STEP, 4)) == "1STEP4"


@given(st.one_of(scheduled(), executed()))
def test_a_placement_looked_up_at_once_is_the_one_looked_up_singly(program):
    placement = program.placement
    table = placement.rank_table(program.microbatches)
    assert table.shape == (program.stages, program.microbatches)
    for stage in range(program.stages):
        for m in range(program.microbatches):
            assert table[stage, m] == placement.rank(stage, m)
            assert stage in placement.stages_of(placement.rank(stage, m))


@given(executed())
def test_programs_are_equal_by_content(program):
    again = Program.of(
        program.name, program.placement, program.microbatches, [list(program.actions(r)) for r in range(program.ranks)]
    )
    assert program == again
    other = Program("other", program.placement, program.microbatches, program.rows)
    assert program != other
    assert len(program) == sum(len(row) for row in again.rows)


def test_a_linear_placement_has_stage_s_on_rank_s():
    placement = Placement.linear(3)
    assert [placement.rank(s) for s in range(3)] == [0, 1, 2]
    assert (placement.stages, placement.copies) == (3, 1)


def test_kinds_of_actions_have_the_same_number_as_operations():
    assert {k.name: k.value for k in Kind if k < 16} == {o.name: o.value for o in Op}


def test_a_timeline_gives_back_its_spans():
    spans = [Span(0, Kind.F, 0, 0, 0.0, 1.5), Span(1, Kind.WAIT_F, 1, 0, 0.0, 1.5)]
    assert list(Timeline.of(spans, [[0, 2], [0, 2]])) == spans
    measured = Timeline.of([Span(0, Kind.STEP, 0, -1, 2**62, 2**62 + 1)], [[0, 2**62 + 1]], measured=True)
    assert (measured.end - measured.start).tolist() == [1]
    assert COMPUTE_KINDS == (Kind.F, Kind.B, Kind.I, Kind.W)
    assert len(Timeline.of([], [[0, 1]])) == 0
