"""The step of a replica without samples is proven as all others are: it reduces, updates and gathers as they do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import settings

from engine.plan import programs
from engine.plan.actions import Action, Op, Program
from engine.plan.lowering import lower
from engine.plan.programs import idle_step
from engine.plan.schedules import build
from engine.plan.verify import InvalidProgram, verify_idle
from engine.prepare import prepare

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_v", "dualpipe", "chimera"]


def pair(schedule: str, reduce: bool = True, gather: bool = True) -> tuple[Program, Program]:
    """(the idle program, one with samples)"""
    whole = lower(build(schedule, 2, 4), reduce, step=True, gather=gather)
    return idle_step(whole.placement, reduce, gather), whole


def changed(program: Program, rank: int, row: list[Action]) -> Program:
    rows = [list(program.actions(each)) for each in range(program.ranks)]
    rows[rank] = row
    return Program.of(program.name, program.placement, 0, rows)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_the_engine_makes_is_accepted(schedule: str, reduce: bool, gather: bool) -> None:
    idle, whole = pair(schedule, reduce, gather)
    verify_idle(idle, [whole])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_action_left_out_doubled_or_moved_is_refused(schedule: str) -> None:
    idle, whole = pair(schedule)
    for rank in range(2):
        row, other = list(idle.actions(rank)), list(idle.actions(1 - rank))
        for at, action in enumerate(row):
            with pytest.raises(InvalidProgram) as refused:
                verify_idle(changed(idle, rank, row[:at] + row[at + 1 :]), [whole])
            assert str(action.op.name) in str(refused.value) or action.op is Op.STEP
            with pytest.raises(InvalidProgram, match="one too many"):
                verify_idle(changed(idle, rank, [*row[:at], action, *row[at:]]), [whole])
            moved = changed(changed(idle, rank, row[:at] + row[at + 1 :]), 1 - rank, [action, *other])
            with pytest.raises(InvalidProgram):
                verify_idle(moved, [whole])
        for op in (Op.F, Op.B, Op.SEND_F, Op.RECV_B):
            with pytest.raises(InvalidProgram, match="is not an action of a program of"):
                verify_idle(changed(idle, rank, [Action(row[0].stage, op, 0), *row]), [whole])
        with pytest.raises(InvalidProgram, match=r"the parameters are updated|must be the last of its rank"):
            verify_idle(changed(idle, rank, row[::-1]), [whole])


@pytest.mark.parametrize(("reduce", "gather"), [(False, False), (True, False), (False, True)])
def test_what_the_others_would_wait_for_is_named(reduce: bool, gather: bool) -> None:
    _, whole = pair("1f1b")
    idle, _ = pair("1f1b", reduce, gather)
    missing = "GATHER" if reduce else "REDUCE_GRAD"
    with pytest.raises(InvalidProgram, match=rf"rank 0 lacks 0{missing}, for which the other replicas wait"):
        verify_idle(idle, [whole])


def test_what_nobody_else_does_is_named() -> None:
    _, whole = pair("1f1b", reduce=False, gather=False)
    idle, _ = pair("1f1b", reduce=True, gather=False)
    with pytest.raises(InvalidProgram, match="0REDUCE_GRAD has no counterpart in 1f1b of 4 micro-batches"):
        verify_idle(idle, [whole])


def test_a_job_with_a_broken_idle_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings("1f1b", 2, 2, 2, train=replace(settings().train, steps=1))
    prepare.prepare(asked, ".", ".")
    made = programs.idle_step
    monkeypatch.setattr(programs, "idle_step", lambda placement, reduce, gather: made(placement, False, gather))
    with pytest.raises(ValueError, match=r"program idle is invalid.* lacks 0REDUCE_GRAD"):
        prepare.prepare(asked, ".", ".")
