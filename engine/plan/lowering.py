"""From a compute-only program to one that lists its communication, its reductions and its step.

Where each added action stands in a row (u: one computation, or an overlapped pair):

    RECV for u+1 | u | SEND of u | REDUCE after the last u of a stage (later stages first) | ... | STEP | GATHER

STEP and GATHER stand at the end. The first stages, which are needed first, are gathered first.

In an asynchronous program REDUCE and STEP of an update follow the SEND of its last backward.

A RECV stands where it is *posted*: before the computation that precedes the one which needs it, so that the message
can travel while the rank computes, and at most one computation ahead. On each directed channel receives are posted in
the order in which the other side sends (a channel matches by order: the k-th send is the k-th receive); where the two
orders differ, earlier than one computation ahead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from engine.plan.actions import COMPUTE, NO_MICROBATCH, Op, Program, Row, pack
from engine.plan.dependencies import Flat

Channel = tuple[int, int, str]
_POST, _COMPUTE, _SEND, _REDUCE, _STEP, _GATHER = range(6)  # order within one unit of a row


class _Items(NamedTuple):
    """Actions with the place they take: sorted by rank, unit, phase, then `turn`. Parallel arrays."""

    codes: Row
    rank: Row
    unit: Row
    phase: Row
    turn: Row


def lower(program: Program, reduce: bool, step: bool, gather: bool = False) -> Program:
    """Add SEND and RECV between ranks, REDUCE after each stage's last backward, and STEP at the end of each row; with
    `gather` also a GATHER of each stage behind that.

    `program` lists computations; where it is asynchronous also the STEPs of its updates: these stay, each with a REDUCE
    before it. Raises ValueError where it lists more, and for `gather` where it is asynchronous. `step=False` leaves out
    every STEP.
    """
    flat = Flat(program)
    compute, updates = flat.having(*COMPUTE), np.flatnonzero(flat.having(Op.STEP) & (flat.microbatch >= 0))
    if compute.sum() + len(updates) < len(flat):
        raise ValueError(f"program {program.name} is lowered already: it lists more than computations")
    if gather and len(updates):
        raise ValueError(
            f"program {program.name} is asynchronous: its updates cannot be divided and gathered; use a synchronous "
            "schedule, or leave out shard_optimizer and parameter servers"
        )
    second = np.zeros(len(flat), dtype=np.bool_)
    second[1:] = flat.fused[:-1]
    unit: Row = np.cumsum(compute & ~second, dtype=np.int64)  # an update belongs to the computation before it
    computations = np.flatnonzero(compute)
    parts = [_items(flat.codes[computations], flat.rank[computations], unit[computations], _COMPUTE, computations)]
    parts += [_messages(flat, unit, forward) for forward in (True, False)]
    if reduce:
        parts.append(_of_updates(flat, unit, updates, _REDUCE) if len(updates) else _reductions(flat, unit))
    if step:
        parts.append(_of_updates(flat, unit, updates, _STEP) if len(updates) else _steps(program, len(flat)))
    if gather:
        rank, stage = np.array(program.placement.homes, dtype=np.int64).T
        after = np.full(len(rank), len(flat) + 1)
        parts.append(_items(pack(Op.GATHER, stage, NO_MICROBATCH), rank, after, _GATHER, stage))
    merged = _Items(*map(np.concatenate, zip(*parts, strict=True)))
    order = np.lexsort((merged.turn, merged.phase, merged.unit, merged.rank))
    ends = np.searchsorted(merged.rank[order], np.arange(1, program.ranks))
    return replace(program, rows=tuple(np.split(merged.codes[order], ends)))


def channels(program: Program) -> list[Channel]:
    """Return the directed channels of a program, sorted: (source rank, destination rank, "F" or "B")."""
    flat = Flat(program)
    used: set[Channel] = set()
    for forward in (True, False):
        made, needed = _edges(flat, forward)
        pairs = np.unique(np.stack([flat.rank[made], flat.rank[needed]], axis=1), axis=0)
        used.update((int(a), int(b), "F" if forward else "B") for a, b in pairs)
    return sorted(used)


def _items(codes: Row, rank: Row, unit: Row, phase: int, turn: Row) -> _Items:
    return _Items(codes, rank, unit, np.full(len(codes), phase, dtype=np.int64), turn)


def _edges(flat: Flat, forward: bool) -> tuple[Row, Row]:
    """Computations whose result crosses to another rank, in row order, and those that need it: two index arrays."""
    ops = (Op.F,) if forward else (Op.B, Op.I)
    made = np.flatnonzero(flat.having(*ops) & (flat.stage != (flat.program.stages - 1 if forward else 0)))
    needed = flat.find(*ops)[flat.stage[made] + (1 if forward else -1), flat.microbatch[made]]
    crossing = (needed >= 0) & (flat.rank[made] != flat.rank[needed])
    return made[crossing], needed[crossing]


def _messages(flat: Flat, unit: Row, forward: bool) -> _Items:
    """The SENDs and RECVs of one direction."""
    made, needed = _edges(flat, forward)
    sends, recvs = (Op.SEND_F, Op.RECV_F) if forward else (Op.SEND_B, Op.RECV_B)
    posted = _in_channel_order(flat, made, needed)
    first_unit = unit[np.minimum(flat.offsets[:-1], len(flat) - 1)]
    early = np.maximum(unit[posted] - 1, first_unit[flat.rank[needed]])
    send = _items(pack(sends, flat.stage[made], flat.microbatch[made]), flat.rank[made], unit[made], _SEND, made)
    recv = _items(pack(recvs, flat.stage[needed], flat.microbatch[needed]), flat.rank[needed], early, _POST, posted)
    return _Items(*map(np.concatenate, zip(send, recv, strict=True)))


def _in_channel_order(flat: Flat, made: Row, needed: Row) -> Row:
    """By which computation each RECV must be there so that none overtakes another on its channel.

    A receive is needed no later than any receive that the sender sends after it: the smallest of these.
    """
    channel = flat.rank[made] * flat.program.ranks + flat.rank[needed]
    order = np.argsort(channel, kind="stable")  # `made` ascends, so the order within a channel is the sender's
    bounds = np.flatnonzero(np.diff(channel[order])) + 1
    posted = needed.copy()
    for part in np.split(order, bounds):
        posted[part] = np.minimum.accumulate(needed[part][::-1])[::-1]
    return posted


def _reductions(flat: Flat, unit: Row) -> _Items:
    """One REDUCE per rank and stage, where the gradients of this stage and of the later ones there are complete.

    On every rank in descending order of stages: replicas that run different programs (a short batch) reduce in one
    order. A copy of a stage that no micro-batch visits has none to wait for, and still takes part: at the end.
    """
    homes, last = flat.program.placement.homes[::-1], flat.last(Op.B, Op.W)
    rank, stage = np.array(homes, dtype=np.int64).T
    at = np.array([last.get(home, len(flat)) for home in homes], dtype=np.int64)
    for index in range(1, len(homes)):
        if rank[index] == rank[index - 1]:
            at[index] = max(at[index], at[index - 1])
    units = np.append(unit, len(flat) + 1)
    return _items(pack(Op.REDUCE, stage, NO_MICROBATCH), rank, units[at], _REDUCE, -stage)


def _of_updates(flat: Flat, unit: Row, updates: Row, phase: int) -> _Items:
    """The REDUCEs or the STEPs of an asynchronous program, where its STEPs are listed."""
    codes = flat.codes[updates] if phase == _STEP else pack(Op.REDUCE, flat.stage[updates], NO_MICROBATCH)
    return _items(codes, flat.rank[updates], unit[updates], phase, updates)


def _steps(program: Program, after: int) -> _Items:
    """STEP of each rank's lowest stage, behind all units."""
    homes = np.array(program.placement.homes, dtype=np.int64)
    rank, lowest = np.unique(homes[:, 0], return_index=True)
    steps = pack(Op.STEP, homes[lowest, 1], NO_MICROBATCH)
    return _items(steps, rank, np.full(len(rank), after + 1), _STEP, rank)
