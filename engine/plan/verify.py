"""The proof that a program can run (law 3): complete, placed, ordered, its channels matched, and free of deadlock.

The rule of progress is the executor's own. A SEND is posted when reached and never blocks; a RECV is posted where it is
listed and never blocks; a computation waits for its message, which is there once its SEND has been reached and its
RECV has been posted. A program that passes runs to its end whatever its actions cost: who waits for whom does not
depend on time.

All checks but the last look at whole arrays at once; the last walks the program once. So millions of actions are cheap.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from engine.plan.actions import COMPUTE, NO_MICROBATCH, RECVS, SENDS, Action, Op, Program, Row
from engine.plan.dependencies import Dependencies, Flat, dependencies, progress
from engine.plan.text import grid

_MESSAGES = (*SENDS, *RECVS)
_BACKWARD = (Op.B, Op.I, Op.W)


class InvalidProgram(ValueError):  # noqa: N818 (it says what is wrong, as StopIteration does)
    """A program that would not run, or not compute what it should.

    `action` is the one at fault, `blocker` the one it directly waits for or collides with, both as text.
    """

    def __init__(self, message: str, action: str, blocker: str) -> None:
        super().__init__(message)
        self.action = action
        self.blocker = blocker


def verify(program: Program) -> None:
    """Raise InvalidProgram unless the program, compute-only or lowered, is proven to run.

    A program without any backward is one of evaluation: its forwards alone make it complete.
    """
    if len(program.rows) != program.placement.ranks:
        raise InvalidProgram(
            f"program {program.name} has {len(program.rows)} rows for {program.placement.ranks} ranks", "row", "rank"
        )
    flat = Flat(program)
    _in_range(flat)
    _placed(flat)
    _complete(flat)
    if flat.lowered:
        _messages_complete(flat)
    _tail(flat)
    waits = dependencies(flat)
    _ordered(flat, waits)
    _ascending(flat)
    _channels(flat)
    _progress(flat, waits)


def peak_in_flight(program: Program) -> list[int]:
    """For each rank the most micro-batches whose forward ran and whose (input-)backward did not.

    A rank with several stages counts (stage, micro-batch) pairs. A forward-only program keeps nothing.
    """
    peaks = []
    for row in program.rows:
        op = row >> 56
        change = (op == Op.F).astype(np.int64) - ((op == Op.B) | (op == Op.I))
        keeps = bool((change < 0).any())
        peaks.append(int(np.cumsum(change).max(initial=0)) if keeps else 0)
    return peaks


def _fail(flat: Flat, at: int | None, action: object, blocker: object, sentence: str) -> NoReturn:
    """Raise, with the grid and an arrow at the action of index `at`."""
    mark = None if at is None else flat.position(at)
    where = "" if mark is None else f"rank {mark[0]}, position {mark[1]}: "
    message = f"program {flat.program.name} is invalid. {where}{sentence}\n\n{grid(flat.program, mark)}\n"
    raise InvalidProgram(message, str(action), str(blocker))


def _first(mask: npt.NDArray[np.bool_]) -> int | None:
    """The first index at which a flat mask holds."""
    index = int(np.argmax(mask)) if len(mask) else 0
    return index if len(mask) and mask[index] else None


# --- what stands where ----------------------------------------------------------------------------------------------


def _in_range(flat: Flat) -> None:
    program = flat.program
    known = (flat.op >= 0) & (flat.op <= max(Op)) & (flat.stage < program.stages)
    needs = flat.op <= max(_MESSAGES)
    known &= np.where(needs, flat.microbatch >= 0, True) & (flat.microbatch < program.microbatches)
    if (at := _first(~known)) is not None:
        name = str(flat.action(at)) if 0 <= flat.op[at] <= max(Op) else f"code {flat.codes[at]:#x}"
        there = f"{program.stages} stages x {program.microbatches} micro-batches"
        _fail(flat, at, name, there, f"{name} is not an action of a program of {there}")


def _placed(flat: Flat) -> None:
    """Every action stands on the rank of its stage; REDUCE and STEP on one that holds the stage."""
    alone = flat.microbatch == NO_MICROBATCH
    home = flat.home[flat.stage, np.maximum(flat.microbatch, 0)]
    wrong = ~alone & (home != flat.rank)
    for index in np.flatnonzero(alone).tolist():
        wrong[index] = flat.stage[index] not in flat.program.placement.stages_of(int(flat.rank[index]))
    if (at := _first(wrong)) is not None:
        place = f"stage {flat.stage[at]} on rank {home[at]}"
        _fail(flat, at, flat.action(at), place, f"{flat.action(at)} is misplaced: the placement has {place}")


def _count(flat: Flat, op: Op) -> Row:
    """How often `op` occurs for each (stage, micro-batch): shape [S, M]."""
    size = flat.home.shape
    at = flat.having(op)
    cell = flat.stage[at] * size[1] + flat.microbatch[at]
    return np.bincount(cell, minlength=size[0] * size[1]).reshape(size)


def _twice(flat: Flat, op: Op, count: Row) -> None:
    if (cell := _first((count > 1).ravel())) is None:
        return
    stage, microbatch = divmod(cell, count.shape[1])
    same = flat.having(op) & (flat.stage == stage) & (flat.microbatch == microbatch)
    first, second = np.flatnonzero(same)[:2].tolist()
    action = flat.action(second)
    _fail(flat, second, action, action, f"{action} is listed again: {action} stands at position {_at(flat, first)}")


def _at(flat: Flat, index: int) -> str:
    rank, position = flat.position(index)
    return f"{position} of rank {rank}"


def _missing(flat: Flat, op: Op, absent: npt.NDArray[np.bool_], users: tuple[tuple[Op, int], ...]) -> None:
    """Fail for the first (stage, micro-batch) of `absent`. `users`: who would notice, as (op, stage offset)."""
    if (cell := _first(absent.ravel())) is None:
        return
    stage, microbatch = divmod(cell, absent.shape[1])
    gone = Action(stage, op, microbatch)
    home = flat.home[stage, microbatch]
    for user, offset in users:
        same = flat.having(user) & (flat.stage == stage + offset) & (flat.microbatch == microbatch)
        if (at := _first(same)) is not None:
            action = flat.action(at)
            _fail(flat, at, action, gone, f"{action} needs {gone}, which is missing on rank {home}")
    _fail(flat, None, gone, f"rank {home}", f"{gone} is missing on rank {home}")


def _complete(flat: Flat) -> None:
    """F and (B, or I and W) of every (stage, micro-batch) exactly once; or F alone, everywhere."""
    forward, full, half, weight = (_count(flat, op) for op in COMPUTE)
    for op, count in zip(COMPUTE, (forward, full, half, weight), strict=True):
        _twice(flat, op, count)
    _missing(flat, Op.F, forward == 0, ((Op.F, 1), (Op.B, 0), (Op.I, 0), (Op.F, -1)))
    if not flat.having(*_BACKWARD).any():
        return
    both = (full > 0) & (half + weight > 0)
    if (cell := _first(both.ravel())) is not None:
        stage, microbatch = divmod(cell, both.shape[1])
        other = Op.I if half[stage, microbatch] else Op.W
        at, action, blocker = _index(flat, other, stage, microbatch), Action(stage, other, microbatch), Op.B
        twin = Action(stage, blocker, microbatch)
        _fail(flat, at, action, twin, f"{action} repeats a part of {twin}, the full backward")
    _missing(flat, Op.B, (full + half + weight) == 0, ((Op.B, -1), (Op.I, -1), (Op.F, 0)))
    _missing(flat, Op.I, (half == 0) & (weight > 0), ((Op.W, 0),))
    _missing(flat, Op.W, (weight == 0) & (half > 0), ((Op.I, 0),))


def _index(flat: Flat, op: Op, stage: int, microbatch: int) -> int:
    return int(flat.find(op)[stage, microbatch])


def _messages_complete(flat: Flat) -> None:
    """A SEND and a RECV for every result that crosses to another rank, and no other."""
    home = flat.home
    crossing = home[:-1] != home[1:]  # between stage s and s+1
    trained = flat.having(*_BACKWARD).any()
    none = np.zeros((1, home.shape[1]), dtype=bool)
    ahead, behind = np.concatenate([crossing, none]), np.concatenate([none, crossing])
    expected = {Op.SEND_F: ahead, Op.RECV_F: behind, Op.SEND_B: behind & trained, Op.RECV_B: ahead & trained}
    users: dict[Op, tuple[tuple[Op, int], ...]] = {
        Op.SEND_F: ((Op.RECV_F, 1), (Op.F, 1)),
        Op.RECV_F: ((Op.F, 0),),
        Op.SEND_B: ((Op.RECV_B, -1), (Op.B, -1), (Op.I, -1)),
        Op.RECV_B: ((Op.B, 0), (Op.I, 0)),
    }
    for op, wanted in expected.items():
        count = _count(flat, op)
        _twice(flat, op, count)
        _missing(flat, op, wanted & (count == 0), users[op])
        if (cell := _first((~wanted & (count > 0)).ravel())) is not None:
            action = Action(cell // home.shape[1], op, cell % home.shape[1])
            at = _index(flat, op, action.stage, action.microbatch)
            _fail(
                flat, at, action, "no other rank", f"{action} has no other rank at its far end: nothing crosses there"
            )


# --- in which order -------------------------------------------------------------------------------------------------


def _tail(flat: Flat) -> None:
    """REDUCE and STEP: on all or on none; REDUCE after the stage's last backward, one STEP per rank, last."""
    placement = flat.program.placement
    last: dict[tuple[int, int], int] = {}
    for index in np.flatnonzero(flat.having(Op.B, Op.W)).tolist():
        last[int(flat.rank[index]), int(flat.stage[index])] = index
    reduces = _by_place(flat, Op.REDUCE)
    steps = {rank: index for (rank, _), index in _by_place(flat, Op.STEP).items()}
    for rank in range(flat.program.ranks):
        for stage in placement.stages_of(rank):
            _reduced(flat, reduces, last.get((rank, stage)), rank, stage)
    if not steps:
        return
    for rank in range(flat.program.ranks):
        stages, end = placement.stages_of(rank), int(flat.offsets[rank + 1]) - 1
        if not stages:
            continue
        if rank not in steps:
            gone = Action(stages[0], Op.STEP)
            _fail(flat, end, flat.action(end), gone, f"after {flat.action(end)} rank {rank} lacks its {gone}")
        if steps[rank] != end:
            step, after = flat.action(steps[rank]), flat.action(end)
            _fail(flat, steps[rank], step, after, f"{step} must be the last of its rank, but {after} comes after it")
        if not last:
            step = flat.action(end)
            _fail(flat, end, step, "no backward", f"{step} has no gradients to step with: there is no backward")


def _by_place(flat: Flat, op: Op) -> dict[tuple[int, int], int]:
    """(rank, stage) -> index of the REDUCE there; (rank, 0) -> index of the STEP. Fails for two at one place."""
    places: dict[tuple[int, int], int] = {}
    for index in np.flatnonzero(flat.having(op)).tolist():
        place = (int(flat.rank[index]), int(flat.stage[index]) if op is Op.REDUCE else 0)
        action = flat.action(index)
        if place in places:
            first = flat.action(places[place])
            _fail(flat, index, action, first, f"{action} is listed again: {first} stands before it on its rank")
        places[place] = index
    return places


def _reduced(flat: Flat, reduces: dict[tuple[int, int], int], last: int | None, rank: int, stage: int) -> None:
    if not reduces:
        return
    at = reduces.get((rank, stage))
    reduction = Action(stage, Op.REDUCE)
    if at is None:
        action = reduction if last is None else flat.action(last)
        _fail(
            flat, last, action, reduction, f"nothing reduces what {action} accumulated: rank {rank} lacks {reduction}"
        )
    if last is None or at < last:
        blocker = "no backward" if last is None else flat.action(last)
        _fail(flat, at, reduction, blocker, f"{reduction} comes before the gradients are complete: it needs {blocker}")


def _ordered(flat: Flat, waits: Dependencies) -> None:
    """What an action needs of its own rank comes before it in the row."""
    index = np.arange(len(flat))
    for needed, why in ((waits.own, "which comes only later on its rank"), (waits.posted, "posted only later")):
        if (at := _first(needed > index)) is not None:
            action, blocker = flat.action(at), flat.action(int(needed[at]))
            _fail(flat, at, action, blocker, f"{action} needs {blocker}, {why} (position {_at(flat, int(needed[at]))})")


def _ascending(flat: Flat) -> None:
    """Gradients are added micro-batch after micro-batch, so that every schedule adds the same sum bit by bit."""
    for ops in ((Op.B, Op.I), (Op.B, Op.W)):
        at = np.flatnonzero(flat.having(*ops))
        at = at[np.lexsort((at, flat.stage[at], flat.rank[at]))]
        same = (np.diff(flat.stage[at]) == 0) & (np.diff(flat.rank[at]) == 0)
        if (k := _first(same & (np.diff(flat.microbatch[at]) < 0))) is not None:
            early, late = flat.action(int(at[k])), flat.action(int(at[k + 1]))
            sentence = f"{early} must come after {late}: a stage adds its gradients in ascending micro-batch order"
            _fail(flat, int(at[k]), early, late, sentence)


def _channels(flat: Flat) -> None:
    """On every directed channel the k-th receive is that of the k-th send."""
    ranks, home = flat.program.ranks, flat.home
    for send, recv, step in ((Op.SEND_F, Op.RECV_F, 1), (Op.SEND_B, Op.RECV_B, -1)):
        sent, got = np.flatnonzero(flat.having(send)), np.flatnonzero(flat.having(recv))
        to = home[flat.stage[sent] + step, flat.microbatch[sent]]
        source = home[flat.stage[got] - step, flat.microbatch[got]]
        sent = sent[np.argsort(flat.rank[sent] * ranks + to, kind="stable")]
        got = got[np.argsort(source * ranks + flat.rank[got], kind="stable")]
        other = (flat.stage[sent] + step != flat.stage[got]) | (flat.microbatch[sent] != flat.microbatch[got])
        if (k := _first(other)) is not None:
            a, b = flat.action(int(got[k])), flat.action(int(sent[k]))
            place = f"position {_at(flat, int(sent[k]))}"
            _fail(flat, int(got[k]), a, b, f"{a} would receive what {b} ({place}) sends: the channel's orders differ")


# --- progress -------------------------------------------------------------------------------------------------------


def _progress(flat: Flat, waits: Dependencies) -> None:
    """Every rank reaches the end of its row."""
    unit, free = np.ones(len(flat)), np.zeros(len(flat))
    heads = progress(flat, waits, unit, free).heads
    stuck = np.flatnonzero(heads < flat.offsets[1:])
    if not len(stuck):
        return
    chain = [int(heads[stuck[0]])]
    while True:
        blocker = int(waits.neighbour[chain[-1]])
        at = int(heads[flat.rank[blocker]])
        if at in chain:
            break
        chain.append(at)
    cycle = chain[chain.index(at) :]
    links = []
    for head in cycle:
        source = int(waits.neighbour[head])
        behind = flat.action(int(heads[flat.rank[source]]))
        links.append(
            f"{flat.action(head)} waits for {flat.action(source)}, which rank {flat.rank[source]} lists behind {behind}"
        )
    head = cycle[0]
    _fail(flat, head, flat.action(head), flat.action(int(waits.neighbour[head])), "deadlock: " + "; ".join(links))
