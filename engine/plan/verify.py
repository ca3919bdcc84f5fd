"""The proof that a program can run (law 3): complete, placed, ordered, its channels matched, and free of deadlock.

The rule of progress is the executor's own. A SEND is posted when reached and never blocks; a RECV is posted where it is
listed and never blocks; a computation waits for its message, which is there once its SEND has been reached and its
RECV has been posted. A program that passes runs to its end whatever its actions cost: who waits for whom does not
depend on time.

All checks but the last look at whole arrays at once; the last walks the program once. So millions of actions are cheap.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.plan.actions import Action, Op, Program
from engine.plan.completeness import complete, in_range, messages_complete, paired, placed
from engine.plan.dependencies import Dependencies, Flat, dependencies, progress
from engine.plan.refusal import InvalidProgram, first, place, refuse
from engine.plan.updates import in_updates

__all__ = ["InvalidProgram", "peak_in_flight", "peak_kept", "verify", "verify_idle"]

MOST_LINKS = 8  # of a circle of waiting ranks, in a refusal
Places = dict[tuple[int, int], int]  # (rank, stage) -> index of an action


def verify(program: Program, ascending: bool = True) -> None:
    """Raise InvalidProgram unless the program, compute-only or lowered, is proven to run.

    A program without any backward is one of evaluation: its forwards alone make it complete. One without micro-batches
    is the step of a replica that has no samples (see `verify_idle`). `ascending=False` lets a
    stage add its gradients in another order than that of the micro-batches, as PyTorch's looped BFS does: the sum is
    then the same only up to rounding.
    """
    if len(program.rows) != program.placement.ranks:
        rows, ranks = f"{len(program.rows)} rows", f"{program.placement.ranks} ranks"
        raise InvalidProgram(f"program {program.name} is invalid: it has {rows} for {ranks}", rows, ranks)
    flat = Flat(program)
    in_range(flat)
    placed(flat)
    paired(flat)
    complete(flat)
    if flat.lowered:
        messages_complete(flat)
    waits = dependencies(flat)
    _in_order(flat, waits)
    if ascending or program.asynchronous:
        _ascending(flat)
    if program.asynchronous:
        in_updates(flat)
    else:
        _reductions(flat)
        _steps(flat)
    _gathers(flat)
    _channels(flat)
    _progress(flat, waits)


def verify_idle(program: Program, others: Iterable[Program]) -> None:
    """Raise InvalidProgram unless the step of a replica without samples is proven to fit those of `others`.

    It takes part in what replicas do together, so on every rank it reduces, updates and gathers as they do.
    """
    verify(program)
    flat = Flat(program)
    mine = _together(flat)
    for other in others:
        theirs = _together(Flat(other))
        for (rank, action), at in mine.items():
            if (rank, action) not in theirs:
                name = f"{other.name} of {other.microbatches} micro-batches"
                refuse(flat, at, action, other.name, f"{action} has no counterpart in {name}: it would wait for ever")
        for rank, action in sorted(theirs.keys() - mine.keys()):
            refuse(flat, None, "rank", action, f"rank {rank} lacks {action}, for which the other replicas wait")


def _together(flat: Flat) -> dict[tuple[int, Action], int]:
    """What a rank does with other replicas, and its update: index by (rank, action)."""
    found = np.flatnonzero(flat.having(Op.REDUCE, Op.STEP, Op.GATHER)).tolist()
    return {(int(flat.rank[at]), flat.action(at)): at for at in found}


def peak_in_flight(program: Program) -> list[int]:
    """Return for each rank the most micro-batches whose forward ran and whose (input-)backward did not.

    A rank with several stages counts (stage, micro-batch) pairs. A forward-only program keeps nothing.
    """
    return _peaks(program, (Op.B, Op.I))


def peak_kept(program: Program) -> list[int]:
    """Return for each rank the most micro-batches whose weight gradient is not computed.

    W needs part of what F left.
    """
    return _peaks(program, (Op.B, Op.W))


def _peaks(program: Program, ends: tuple[Op, ...]) -> list[int]:
    peaks = []
    for row in program.rows:
        op = row >> 56
        change = (op == Op.F).astype(np.int64) - np.isin(op, ends)
        keeps = bool((change < 0).any())
        peaks.append(int(np.cumsum(change).max(initial=0)) if keeps else 0)
    return peaks


def _in_order(flat: Flat, waits: Dependencies) -> None:
    """What an action needs of its own rank comes before it in the row."""
    index = np.arange(len(flat))
    for needed in (waits.own, waits.posted):
        if (at := first(needed > index)) is not None:
            action, blocker = flat.action(at), flat.action(int(needed[at]))
            later = place(flat, int(needed[at]))
            refuse(flat, at, action, blocker, f"{action} needs {blocker}, which comes only later, at {later}")


def _ascending(flat: Flat) -> None:
    """Gradients are added micro-batch after micro-batch, so that every schedule adds the same sum bit by bit."""
    for ops in ((Op.B, Op.I), (Op.B, Op.W)):
        at = np.flatnonzero(flat.having(*ops))
        at = at[np.lexsort((at, flat.stage[at], flat.rank[at]))]
        same = (np.diff(flat.stage[at]) == 0) & (np.diff(flat.rank[at]) == 0)
        if (k := first(same & (np.diff(flat.microbatch[at]) < 0))) is not None:
            early, late = flat.action(int(at[k])), flat.action(int(at[k + 1]))
            sentence = f"{early} must come after {late}: a stage adds its gradients in ascending micro-batch order"
            refuse(flat, int(at[k]), early, late, sentence)


def _reductions(flat: Flat) -> None:
    """REDUCE: none at all, or one for every stage on a rank, after the stage's last backward there."""
    reduces = _one_each(flat, Op.REDUCE)
    if not reduces:
        return
    last = flat.last(Op.B, Op.W)
    if not last and flat.program.microbatches:
        _without_backward(flat, min(reduces.values()))
    for home in flat.program.placement.homes:
        reduction, at, backward = Action(home[1], Op.REDUCE), reduces.get(home), last.get(home)
        if at is None:
            before = "rank" if backward is None else flat.action(backward)
            refuse(flat, backward, before, reduction, f"{before} lacks {reduction} after it, on rank {home[0]}")
        if backward is not None and at < backward:
            action = flat.action(backward)
            refuse(
                flat, at, reduction, action, f"{reduction} comes before the gradients are complete: it needs {action}"
            )


def _steps(flat: Flat) -> None:
    """STEP: none at all, or one on every rank that has a stage, with nothing but GATHERs behind it."""
    steps = {rank: index for (rank, _), index in _one_each(flat, Op.STEP, by_stage=False).items()}
    if not steps:
        return
    if flat.program.microbatches and not flat.having(Op.B, Op.W).any():
        _without_backward(flat, min(steps.values()))
    for rank in sorted({rank for rank, _ in flat.program.placement.homes}):
        end = int(flat.offsets[rank + 1]) - 1
        while end >= flat.offsets[rank] and flat.op[end] == Op.GATHER:
            end -= 1
        empty = end < flat.offsets[rank]
        after = "row" if empty else flat.action(end)
        if rank not in steps:
            refuse(flat, None if empty else end, after, "STEP", f"the {after} of rank {rank} is not followed by a STEP")
        if steps[rank] != end:
            step = flat.action(steps[rank])
            refuse(flat, steps[rank], step, after, f"{step} must be the last of its rank, but {after} comes after it")


def _gathers(flat: Flat) -> None:
    """GATHER: none at all, or one for every stage on a rank, after the rank's STEP."""
    gathers = _one_each(flat, Op.GATHER)
    if gathers and flat.program.asynchronous:
        at = min(gathers.values())
        action = flat.action(at)
        refuse(
            flat, at, action, "its versions", f"{action} would mix versions of the weights: updates are asynchronous"
        )
    steps = {int(flat.rank[at]): at for at in np.flatnonzero(flat.having(Op.STEP)).tolist()}
    for rank, stage in flat.program.placement.homes if gathers else ():
        gather, index, step = Action(stage, Op.GATHER), gathers.get((rank, stage)), steps.get(rank)
        if index is None:
            before = "rank" if step is None else flat.action(step)
            refuse(flat, step, before, gather, f"{before} lacks {gather} after it, on rank {rank}")
        if step is None or index < step:
            before = "STEP" if step is None else flat.action(step)
            refuse(flat, index, gather, before, f"{gather} comes before the parameters are updated: it needs {before}")


def _without_backward(flat: Flat, at: int) -> None:
    action = flat.action(at)
    refuse(flat, at, action, "no backward", f"{action} has no gradients to work on: there is no backward")


def _one_each(flat: Flat, op: Op, by_stage: bool = True) -> Places:
    """Where `op` stands on each rank, for each stage or at all. Refuses a second one."""
    places: Places = {}
    for index in np.flatnonzero(flat.having(op)).tolist():
        there = (int(flat.rank[index]), int(flat.stage[index]) if by_stage else 0)
        if there in places:
            action, one = flat.action(index), places[there]
            refuse(flat, index, action, flat.action(one), f"{action} is one too many after that at {place(flat, one)}")
        places[there] = index
    return places


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
        if (k := first(other)) is not None:
            a, b, there = flat.action(int(got[k])), flat.action(int(sent[k])), place(flat, int(sent[k]))
            refuse(flat, int(got[k]), a, b, f"{a} would receive what {b} at {there} sends: the channel's orders differ")


def _progress(flat: Flat, waits: Dependencies) -> None:
    """Every rank reaches the end of its row; else some ranks wait for each other in a circle, and it is shown."""
    heads = progress(flat.offsets, waits.neighbour, np.ones(len(flat)), np.zeros(len(flat))).heads
    stuck = np.flatnonzero(heads < flat.offsets[1:])
    if not len(stuck):
        return
    chain = [int(heads[stuck[0]])]
    while (at := int(heads[flat.rank[waits.neighbour[chain[-1]]]])) not in chain:
        chain.append(at)
    circle = chain[chain.index(at) :]
    links = []
    for head in circle[:MOST_LINKS]:
        source = int(waits.neighbour[head])
        rank, behind = flat.rank[source], int(heads[flat.rank[source]])
        where = (
            f"where rank {rank} stands" if behind == source else f"which rank {rank} lists behind {flat.action(behind)}"
        )
        links.append(f"{flat.action(head)} waits for {flat.action(source)}, {where}")
    if len(circle) > MOST_LINKS:
        links.append(f"and so on, through {len(circle)} ranks")
    blocker = flat.action(int(waits.neighbour[circle[0]]))
    refuse(flat, circle[0], flat.action(circle[0]), blocker, f"deadlock: {'; '.join(links)}")
