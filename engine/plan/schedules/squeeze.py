"""Moving the actions of a repeated building block into free slots, without keeping more than the block does.

A table holds slots [P, 4, M]: when rank r does its four moves (F0, F1, I1, I0) for micro-batch m. W is not in it: it
follows from the rest, each in the first slot after its I that no other action has, in the order of the I.

    _pull_all   everything in the order of slots, W included, into the first free slot in which it can be
    _pull_end   once more for the end, where no forward enters any more: F and I over slots that W had taken, so that W
                moves to the very end

Between the first backward and the last forward of rank 0 nothing has anywhere to go, so only the ends are walked
through. What is asked about the slots between is asked of whole arrays.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F0, F1, I1, I0, W = range(5)
KEEPS = (1, 1, 0, 0, -1)  # activations more, after each of them
Slots = npt.NDArray[np.int64]
Table = list[list[list[int]]]  # the same, as lists: what is read one by one
Item = tuple[int, int, int, int]  # slot, rank, move, micro-batch; for W: a count


def pull(slots: Slots) -> Slots:
    """Draw the ends of a repeated block's table together.

    No rank keeps more activations than one did before.
    """
    written = [weights(rank) for rank in slots]
    held = [_held(rank, w) for rank, w in zip(slots, written, strict=True)]
    peak = max(int(kept.max()) for kept in held)
    middle = range(int(slots[0, I0, 0]), int(slots[0, F0, -1]))
    slots = _pull_all(slots, written, held, peak, middle)
    return _pull_end(slots, peak, begin=max(int(slots[0, F0, -1]), int(slots[0, I0, 0])))


def weights(slots: Slots) -> Slots:
    """Return the slots of a rank's W, ascending, for its moves' slots [4, M]: shape [2M]."""
    halves = np.sort(slots[[I1, I0]], axis=None)
    taken = np.zeros(int(slots.max()) + 2 + len(halves), dtype=bool)
    taken[slots] = True
    (free,) = np.nonzero(~taken)
    order = np.arange(len(halves))
    found: Slots = free[order + np.maximum.accumulate(np.searchsorted(free, halves) - order)]
    return found


def _held(slots: Slots, written: Slots) -> Slots:
    """How many activations a rank keeps, slot by slot: from F to W."""
    change = np.zeros(1 + max(int(slots.max()), int(written.max())), dtype=np.int64)
    change[slots[[F0, F1]]] = KEEPS[F0]
    change[written] = KEEPS[W]
    return np.cumsum(change)


def _pull_all(slots: Slots, written: Sequence[Slots], held: Sequence[Slots], peak: int, middle: range) -> Slots:
    """Everything, in the order of slots, into the first free slot in which it can be; W included.

    A forward only so far that its rank keeps no more than `peak` activations. What is in the `middle`, where blocks
    follow each other without a hole, stays where it is.
    """
    table: Table = slots.tolist()
    halves = [np.sort(rank[[I1, I0]], axis=None).tolist() for rank in slots]
    taken = [_taken(rank, w) for rank, w in zip(slots, written, strict=True)]
    for slot, rank, move, m in _in_order(slots, written, middle):
        earliest = halves[rank][m] + 1 if move == W else _earliest(table, rank, move, m)
        if KEEPS[move] > 0:
            (full,) = np.nonzero(held[rank][earliest:slot] >= peak)
            earliest += int(full[-1]) + 1 if len(full) else 0
        free = taken[rank].find(False, earliest, slot)
        if free < 0:
            continue
        taken[rank][slot], taken[rank][free] = False, True
        held[rank][free:slot] += KEEPS[move]
        if move in (I1, I0):
            del halves[rank][bisect_left(halves[rank], slot)]
            insort(halves[rank], free)
        if move != W:
            table[rank][move][m] = free
    return np.array(table)


def _pull_end(slots: Slots, peak: int, begin: int) -> Slots:
    """F and I from slot `begin` on, in the order of slots, into the first slot that no other F or I has.

    As far as no more than `peak` activations are kept when W takes what is left.
    """
    table: Table = slots.tolist()
    rooms = [_Room(rank, peak) for rank in slots]
    for slot, rank, move, m in _in_order(slots, [], range(begin)):
        earliest = _earliest(table, rank, move, m)
        if earliest < slot:
            table[rank][move][m] = rooms[rank].move(earliest, slot, forward=KEEPS[move] > 0)
    return np.array(table)


class _Room:
    """Where a rank's F and I may go so that it keeps no more than `peak` activations.

    Up to slot t, let there be F(t) forwards, I(t) halves and X(t) of both. W is served like a queue: at most
    C(t) = min over s <= t of I(s) + (free slots after s, up to t) are done. What is kept is F(t) - C(t), so

        F(t) + X(t) - t  -  (I(s) + X(s) - s)  <=  peak      for all s <= t
        ------ up -----     ------ down ----

    and moving one action to an earlier slot p only adds to both between p and where it was.
    """

    def __init__(self, slots: Slots, peak: int) -> None:
        self._peak = peak
        forward, half = (np.bincount(slots[of].reshape(-1), minlength=slots.max() + 1) for of in ([F0, F1], [I1, I0]))
        self._taken = (forward + half).astype(bool)
        time = np.arange(len(forward))
        self._up = np.cumsum(2 * forward + half) - time
        self._down = np.cumsum(forward + 2 * half) - time
        self._lowest = np.minimum.accumulate(np.concatenate([[1], self._down]))  # of `down`, over all slots before

    def move(self, earliest: int, slot: int, forward: bool) -> int:
        """Move what is in `slot` to the first slot from `earliest` on that it may have; returns which."""
        between = slice(earliest, slot)
        rise = 2 if forward else 1
        highest = _from_here_on(self._up[between])
        good = ~self._taken[between] & (highest + rise - self._lowest[between] <= self._peak)
        if forward:
            good &= _from_here_on(highest - self._down[between]) + 1 <= self._peak
        if not good.any():
            return slot
        free = earliest + int(good.argmax())
        self._taken[[slot, free]] = False, True
        self._up[free:slot] += rise
        self._down[free:slot] += 3 - rise
        np.minimum.accumulate(np.append(self._lowest[free], self._down[free:]), out=self._lowest[free:])
        return free


def _from_here_on(values: Slots) -> Slots:
    """The largest of each value and those after it."""
    return np.maximum.accumulate(values[::-1])[::-1]


def _taken(slots: Slots, written: Slots) -> bytearray:
    taken = np.zeros(1 + max(int(slots.max()), int(written.max())), dtype=np.uint8)
    taken[slots], taken[written] = True, True
    return bytearray(taken.tobytes())


def _in_order(slots: Slots, written: Sequence[Slots], skip: range) -> list[Item]:
    """What lies outside of the slots in `skip`, sorted."""
    parts = [np.stack([slots.reshape(-1), *np.indices(slots.shape).reshape(3, -1)])]
    for rank, w in enumerate(written):
        parts.append(np.stack([w, np.full_like(w, rank), np.full_like(w, W), np.arange(len(w))]))
    items = np.concatenate(parts, axis=1)
    items = items[:, (items[0] < skip.start) | (items[0] >= skip.stop)]
    found: list[Item] = items[:, np.lexsort(items[::-1])].T.tolist()
    return found


def _earliest(table: Table, rank: int, move: int, m: int) -> int:
    """The slot after the same micro-batch's move before, and after the same move of the micro-batch before."""
    before = rank - 1 if move in (F0, I1) else rank + 1
    last = table[rank][move][m - 1] if m else -1
    if 0 <= before < len(table):
        last = max(last, table[before][move][m])
    elif move != F0:
        last = max(last, table[rank][move - 1][m])
    return last + 1
