"""Schedules made of one building block: repeat, reorder, squeeze (Qi et al., arXiv 2405.15362).

A micro-batch passes a rank of a V four times: F of chunk 0 on the way down, F of chunk 1 on the way up, then I of chunk
1 down and I of chunk 0 up. A block gives the slots of time in which rank r does so; micro-batch m does the same 6m
slots later. Six slots are what it costs a rank (F, I and W of two chunks), so in the middle nothing idles, and how long
a block keeps an activation tells the peak.

    repeat    the block for every micro-batch; W has no slots of its own and takes those that are left
    reorder   what can begin earlier without raising the peak is pulled into free slots (squeeze.py)
    squeeze   every action as early as its row and its messages allow: what execution does with a row anyhow
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.plan.actions import Op, Program, Row, pack
from engine.plan.schedules.placements import vee
from engine.plan.schedules.squeeze import F0, F1, I0, I1, Slots, pull, weights

PERIOD = 6
Block = Callable[[int, int], tuple[int, int, int, int]]  # (ranks, rank) -> slots of F0, F1, I1, I0


def build_from(name: str, block: Block, ranks: int, microbatches: int) -> Program:
    """Build the program that repeats `block` for every micro-batch."""
    starts = np.array([block(ranks, rank) for rank in range(ranks)])
    repeated: Slots = starts[:, :, None] + PERIOD * np.arange(microbatches)
    slots = pull(repeated)
    rows = tuple(_row((rank, 2 * ranks - 1 - rank), slots[rank]) for rank in range(ranks))
    return Program(name, vee(ranks), microbatches, rows)


def _row(stages: tuple[int, int], slots: Slots) -> Row:
    """The actions of a rank in the order of their `slots` [4, M]; W in the order of the halves they complete."""
    order = np.arange(slots.shape[-1])
    down, up = stages
    moves = {F0: (Op.F, down), F1: (Op.F, up), I1: (Op.I, up), I0: (Op.I, down)}
    forwards = [pack(*moves[move], order) for move in (F0, F1)]
    halves = np.concatenate([pack(*moves[move], order) for move in (I1, I0)])
    ended = np.argsort(slots[[I1, I0]].reshape(-1))
    owed = halves[ended] + pack(Op.W - Op.I, 0, -1)
    codes = np.concatenate([*forwards, halves, owed])
    return codes[np.argsort(np.concatenate([slots.reshape(-1), weights(slots)]))]
