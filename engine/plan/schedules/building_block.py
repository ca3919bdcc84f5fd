"""Schedules made of one building block: repeat, reorder, squeeze (Qi et al., arXiv 2405.15362).

A micro-batch passes a rank of a V four times: F of chunk 0 on the way down, F of chunk 1 on the way up, then I of chunk
1 down and I of chunk 0 up. A block gives the slots of time in which rank r does so; micro-batch m does the same 6m
slots later. Six slots are what it costs a rank (F, I and W of two chunks), so in the middle nothing idles, and how long
a block keeps an activation tells the peak.

    repeat    the block for every micro-batch; W has no slots of its own and takes those that are left
    reorder   what can begin earlier without raising the peak is pulled into free slots; then the same once more for
              the end, where no forward enters any more, over slots that W had taken: W moves to the very end
    squeeze   every action as early as its row and its messages allow: what execution does with a row anyhow
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from itertools import accumulate

from engine.plan.actions import Program, Row
from engine.plan.schedules.placements import vee
from engine.plan.schedules.tape import Tape

PERIOD = 6
F0, F1, I1, I0, W = range(5)
KEEPS = (1, 1, 0, 0, -1)  # activations more, after each of them
Block = Callable[[int, int], tuple[int, int, int, int]]  # (ranks, rank) -> slots of F0, F1, I1, I0
Slots = dict[tuple[int, int], int]  # (move, micro-batch; for W: a count) -> slot


def build_from(name: str, block: Block, ranks: int, microbatches: int) -> Program:
    """The program that repeats `block` for every micro-batch."""
    table = [_repeated(block(ranks, rank), microbatches) for rank in range(ranks)]
    peak = max(max(_held(slots)) for slots in table)
    _pull_all(table, peak, range(table[0][I0, 0], table[0][F0, microbatches - 1]))
    table = [{move: slot for move, slot in slots.items() if move[0] != W} for slots in table]
    _pull_end(table, peak, begin=max(table[0][F0, microbatches - 1], table[0][I0, 0]))
    rows = tuple(_row([rank, 2 * ranks - 1 - rank], _with_weights(slots)) for rank, slots in enumerate(table))
    return Program(name, vee(ranks), microbatches, rows)


def _repeated(moves: Sequence[int], microbatches: int) -> Slots:
    slots = {(move, m): slot + PERIOD * m for move, slot in enumerate(moves) for m in range(microbatches)}
    assert len(set(slots.values())) == len(slots), "two moves of a block share a slot"
    return _with_weights(slots)


def _with_weights(slots: Slots) -> Slots:
    """Add a W for every I: each in the first free slot after it."""
    move_at = {slot: move for (move, _), slot in slots.items()}
    filled, slot, waiting, written = dict(slots), 0, 0, 0
    halves = sum(move in (I1, I0) for move in move_at.values())
    while written < halves:
        move = move_at.get(slot)
        if move in (I1, I0):
            waiting += 1
        elif move is None and waiting:
            filled[W, written] = slot
            waiting, written = waiting - 1, written + 1
        slot += 1
    return filled


def _held(slots: Slots) -> list[int]:
    """How many activations are kept, slot by slot: from F to W."""
    change = [0] * (1 + max(slots.values()))
    for (move, _), slot in slots.items():
        change[slot] = KEEPS[move]
    return list(accumulate(change))


def _pull_all(table: Sequence[Slots], peak: int, middle: range) -> None:
    """Everything, in the order of slots, into the first free slot in which it can be; W included.

    A forward only so far that its rank keeps no more than `peak` activations. What is in the `middle`, where blocks
    follow each other without a hole, stays where it is.
    """
    taken, held = [set(slots.values()) for slots in table], [_held(slots) for slots in table]
    halves: list[list[int]] = [[] for _ in table]  # slots of each rank's I so far, ascending
    for slot, rank, move, m in _in_order(table, 0):
        earliest = halves[rank][m] + 1 if move == W else _earliest(table, rank, move, m)
        if KEEPS[move] > 0:
            full = (s + 1 for s in range(slot - 1, earliest - 1, -1) if held[rank][s] >= peak)
            earliest = next(full, earliest)
        sooner = () if slot in middle else range(earliest, slot)
        free = next((s for s in sooner if s not in taken[rank]), slot)
        taken[rank].remove(slot)
        taken[rank].add(free)
        for s in range(free, slot):
            held[rank][s] += KEEPS[move]
        table[rank][move, m] = free
        if move in (I1, I0):
            insort(halves[rank], free)


def _pull_end(table: Sequence[Slots], peak: int, begin: int) -> None:
    """F and I from slot `begin` on, in the order of slots, into the first slot that no other F or I has.

    As far as no more than `peak` activations are kept when W takes what is left.
    """
    for slot, rank, move, m in _in_order(table, begin):
        slots = table[rank]
        taken = set(slots.values())
        for free in range(_earliest(table, rank, move, m), slot):
            if free not in taken:
                slots[move, m] = free
                if max(_held(_with_weights(slots))) <= peak:
                    break
                slots[move, m] = slot


def _in_order(table: Sequence[Slots], begin: int) -> list[tuple[int, int, int, int]]:
    """(slot, rank, move, micro-batch) of everything from slot `begin` on, sorted."""
    return sorted((slot, rank, *of) for rank, slots in enumerate(table) for of, slot in slots.items() if slot >= begin)


def _earliest(table: Sequence[Slots], rank: int, move: int, m: int) -> int:
    """The slot after the same micro-batch's move before, and after the same move of the micro-batch before."""
    before = rank - 1 if move in (F0, I1) else rank + 1
    last = table[rank][move, m - 1] if m else -1
    if 0 <= before < len(table):
        last = max(last, table[before][move, m])
    elif move != F0:
        last = max(last, table[rank][move - 1, m])
    return last + 1


def _row(stages: Sequence[int], slots: Slots) -> Row:
    microbatches = 1 + max(m for move, m in slots if move == F0)
    tape = Tape(stages, [range(microbatches)] * 2)
    for move, _ in sorted(slots, key=slots.__getitem__):
        if move == W:
            tape.weight()
        else:
            (tape.forward if move in (F0, F1) else tape.half)(0 if move in (F0, I0) else 1)
    return tape.row()
