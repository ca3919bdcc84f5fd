"""What stands where: every action in range and on its rank, each needed one exactly once, and nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.plan.actions import COMPUTE, RECVS, SENDS, Action, Op, Row
from engine.plan.dependencies import Flat
from engine.plan.refusal import first, place, refuse

Users = tuple[tuple[Op, int], ...]
BACKWARD = (Op.B, Op.I, Op.W)

# Who notices that an action is missing: operations at (stage + offset, same micro-batch).
_NOTICED_BY: dict[Op, Users] = {
    Op.F: ((Op.F, 1), (Op.B, 0), (Op.I, 0), (Op.F, -1)),
    Op.B: ((Op.B, -1), (Op.I, -1), (Op.F, 0)),
    Op.I: ((Op.W, 0),),
    Op.W: ((Op.I, 0),),
    Op.SEND_F: ((Op.RECV_F, 1), (Op.F, 1)),
    Op.RECV_F: ((Op.F, 0),),
    Op.SEND_B: ((Op.RECV_B, -1), (Op.B, -1), (Op.I, -1)),
    Op.RECV_B: ((Op.B, 0), (Op.I, 0)),
}


def in_range(flat: Flat) -> None:
    """Check that operations, stages and micro-batches exist, and that what belongs to a micro-batch names one.

    In an asynchronous program a STEP does: the last one of its update.
    """
    program = flat.program
    messages_too = flat.op <= max(*SENDS, *RECVS)
    messages_too |= (flat.op == Op.STEP) & program.asynchronous
    known = (flat.op >= 0) & (flat.op <= max(Op)) & (flat.stage < program.stages)
    known &= ((flat.microbatch >= 0) == messages_too) & (flat.microbatch < program.microbatches)
    if (at := first(~known)) is not None:
        name = str(flat.action(at)) if 0 <= flat.op[at] <= max(Op) else f"code {flat.codes[at]:#x}"
        there = f"{program.stages} stages x {program.microbatches} micro-batches"
        refuse(flat, at, name, there, f"{name} is not an action of a program of {there}")


def placed(flat: Flat) -> None:
    """Check that every action stands on the rank of its stage; REDUCE, STEP and GATHER on one that holds the stage."""
    alone = flat.microbatch < 0
    wrong, rest = np.zeros(len(flat), dtype=bool), np.flatnonzero(~alone)
    wrong[rest] = flat.home[flat.stage[rest], flat.microbatch[rest]] != flat.rank[rest]
    for index in np.flatnonzero(alone).tolist():
        wrong[index] = all(way[flat.stage[index]] != flat.rank[index] for way in flat.program.placement.rank_of)
    if (at := first(wrong)) is not None:
        home = flat.program.placement.rank(int(flat.stage[at]), int(flat.microbatch[at]))
        there = f"stage {flat.stage[at]} on rank {home}"
        refuse(flat, at, flat.action(at), there, f"{flat.action(at)} is misplaced: the placement has {there}")


def paired(flat: Flat) -> None:
    """Check that the first of an overlapped pair is a computation, and so is the action after it on its rank."""
    compute = flat.having(*COMPUTE) & ~flat.fused
    follows = np.append(compute[1:] & (flat.rank[1:] == flat.rank[:-1]), False)
    if (at := first(flat.fused & ~(flat.having(*COMPUTE) & follows))) is not None:
        action, last = flat.action(at), at + 1 >= len(flat) or flat.rank[at + 1] != flat.rank[at]
        after = "the end of the row" if last else str(flat.action(at + 1))
        refuse(flat, at, action, after, f"{action} is to overlap a single computation, but {after} comes next")


def complete(flat: Flat) -> None:
    """Check that F and (B, or I and W) of every (stage, micro-batch) stand exactly once; or F alone, everywhere."""
    forward, full, half, weight = (_once(flat, op) for op in COMPUTE)
    _absent(flat, Op.F, forward == 0)
    if not flat.having(*BACKWARD).any():
        return
    both = (full > 0) & (half + weight > 0)
    if (cell := first(both)) is not None:
        stage, microbatch = divmod(cell, both.shape[1])
        part = Action(stage, Op.I if half[stage, microbatch] else Op.W, microbatch)
        whole = Action(stage, Op.B, microbatch)
        at = int(flat.find(part.op)[stage, microbatch])
        refuse(flat, at, part, whole, f"{part} repeats a part of {whole}, the full backward")
    _absent(flat, Op.B, (full + half + weight) == 0)
    _absent(flat, Op.I, (half == 0) & (weight > 0))
    _absent(flat, Op.W, (weight == 0) & (half > 0))


def messages_complete(flat: Flat) -> None:
    """Check that there is a SEND and a RECV for every result that crosses to another rank, and no other."""
    home = flat.home
    crossing = home[:-1] != home[1:]  # between stage s and s+1
    none = np.zeros((1, home.shape[1]), dtype=bool)
    ahead, behind = np.concatenate([crossing, none]), np.concatenate([none, crossing])
    trained = flat.having(*BACKWARD).any()
    expected = {Op.SEND_F: ahead, Op.RECV_F: behind, Op.SEND_B: behind & trained, Op.RECV_B: ahead & trained}
    for op, wanted in expected.items():
        count = _once(flat, op)
        _absent(flat, op, wanted & (count == 0))
        if (cell := first(~wanted & (count > 0))) is not None:
            action = Action(cell // home.shape[1], op, cell % home.shape[1])
            at = int(flat.find(op)[action.stage, action.microbatch])
            refuse(
                flat, at, action, "no other rank", f"{action} has no other rank at its far end: nothing crosses there"
            )


def _once(flat: Flat, op: Op) -> Row:
    """How often `op` occurs for each (stage, micro-batch), 0 or 1: shape [S, M]. Refuses what occurs twice."""
    shape = flat.home.shape
    at = flat.having(op)
    cells = flat.stage[at] * shape[1] + flat.microbatch[at]
    count: Row = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    if (cell := first(count > 1)) is not None:
        one, two = np.flatnonzero(at)[cells == cell][:2].tolist()
        action = flat.action(two)
        refuse(flat, two, action, action, f"{action} is listed again: {action} stands at {place(flat, one)}")
    return count


def _absent(flat: Flat, op: Op, absent: npt.NDArray[np.bool_]) -> None:
    """Refuse for the first (stage, micro-batch) of `absent`, in the name of an action that would wait for it."""
    if (cell := first(absent)) is None:
        return
    stage, microbatch = divmod(cell, absent.shape[1])
    gone, home = Action(stage, op, microbatch), flat.home[stage, microbatch]
    for user, offset in _NOTICED_BY[op]:
        same = flat.having(user) & (flat.stage == stage + offset) & (flat.microbatch == microbatch)
        if (at := first(same)) is not None:
            action = flat.action(at)
            refuse(flat, at, action, gone, f"{action} lacks {gone}, which is missing on rank {home}")
    refuse(flat, None, gone, f"rank {home}", f"{gone} is missing on rank {home}")
