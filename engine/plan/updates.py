"""Updates of an asynchronous program: which weights a micro-batch reads, how old they are, and how many are kept.

    rank 0 | F0 F1 F2 B0 STEP0 F3 B1 STEP1 F4 ...      F3 reads version 1, and so does B3, two updates later

Version v of a stage's weights is what v updates of the program have left; version 0 is there when the program begins.
A STEP names the last micro-batch whose gradient is in its update. Every stage takes all updates, each in its own time:
nothing is in flight only where the program begins and ends.
"""

from __future__ import annotations

import numpy as np

from engine.plan.actions import Action, Op, Program, Row, unpack
from engine.plan.dependencies import Flat
from engine.plan.refusal import first, refuse

_BACKWARD_ENDS = (Op.B, Op.W)


def read_versions(program: Program) -> Row:
    """Return the version that forward and backward of (stage, micro-batch) use: shape [S, M]."""
    return newest_versions(program) if program.versions is None else program.versions


def newest_versions(program: Program) -> Row:
    """Return how many updates of a stage come before the forward of (stage, micro-batch): shape [S, M]."""
    table = np.zeros((program.stages, program.microbatches), dtype=np.int64)
    for row in program.rows:
        fields = unpack(row)
        for stage in np.unique(fields.stage):
            here = fields.stage == stage
            op, done = fields.op[here], np.cumsum(fields.op[here] == Op.STEP)
            forward = op == Op.F
            table[stage, fields.microbatch[here][forward]] = done[forward]
    return table


def staleness(program: Program) -> Row:
    """Return the updates between the weights that (stage, micro-batch) reads and those it changes: shape [S, M].

    0 everywhere in a synchronous program.
    """
    if not program.asynchronous:
        return np.zeros((program.stages, program.microbatches), dtype=np.int64)
    updates = _updates(program)
    into: Row = np.searchsorted(updates, np.arange(program.microbatches))
    return into[None, :] - read_versions(program)


def peak_versions(program: Program) -> list[int]:
    """Return the most versions of a stage's weights that a rank keeps: the newest, and those still to be read."""
    if not program.asynchronous:
        return [1] * program.ranks
    versions = read_versions(program)
    peaks = []
    for row in program.rows:
        fields = unpack(row)
        stages = np.unique(fields.stage)
        peaks.append(max((_peak(row[fields.stage == s], versions[s]) for s in stages), default=1))
    return peaks


def _peak(row: Row, reads: Row) -> int:
    """The same for one stage; `row`: its own actions, `reads[m]`: the version that micro-batch m reads."""
    fields = unpack(row)
    steps = np.flatnonzero(fields.op == Op.STEP)
    made = np.concatenate([[0], steps])
    gone = np.append(steps, len(row))  # replaced by the next one, unless it is read later still
    ends = np.flatnonzero(np.isin(fields.op, _BACKWARD_ENDS))
    np.maximum.at(gone, reads[fields.microbatch[ends]], ends)
    change = np.zeros(len(row) + 1, dtype=np.int64)
    np.add.at(change, made, 1)
    np.add.at(change, gone, -1)
    return int(np.cumsum(change).max())


def _updates(program: Program) -> Row:
    """The micro-batches that the updates name, of the first rank that has any."""
    for row in program.rows:
        fields = unpack(row)
        steps = fields.op == Op.STEP
        if steps.any():
            named: Row = fields.microbatch[steps & (fields.stage == fields.stage[steps][0])]
            return named
    return np.empty(0, dtype=np.int64)


def in_updates(flat: Flat) -> None:
    """Refuse an asynchronous program whose updates differ between stages, are incomplete or out of place.

    An update comes after the backwards of its micro-batches and before any other; between them is its REDUCE, if there
    are any. No micro-batch reads weights that do not exist yet.
    """
    wanted, reduced = _updates(flat.program), bool(flat.having(Op.REDUCE).any())
    for rank, stage in flat.program.placement.homes:
        row = np.arange(flat.offsets[rank], flat.offsets[rank + 1])
        here = row[flat.stage[row] == stage]
        done: Row = np.cumsum(np.isin(flat.op[here], _BACKWARD_ENDS), dtype=np.int64)
        steps = flat.op[here] == Op.STEP
        _all_taken(flat, here[steps], wanted, stage, rank)
        _after_backwards(flat, here[steps], done[steps])
        if reduced:
            _each_reduced(flat, here, done)
    left = flat.program.microbatches - 1
    if left not in wanted:
        at = int(flat.find(*_BACKWARD_ENDS)[0, left])
        action = flat.action(at)
        refuse(flat, at, action, "STEP", f"{action} is in no update: the last STEP must name micro-batch {left}")
    _readable(flat)


def _all_taken(flat: Flat, steps: Row, wanted: Row, stage: int, rank: int) -> None:
    """The stage takes every update, once and in order."""
    found = flat.microbatch[steps]
    if (k := first(np.diff(found) <= 0)) is not None:
        early, late = flat.action(int(steps[k])), flat.action(int(steps[k + 1]))
        refuse(flat, int(steps[k + 1]), late, early, f"{late} comes after {early}: updates are taken once, in order")
    if len(missing := np.setdiff1d(wanted, found)):
        step = Action(stage, Op.STEP, int(missing[0]))
        at = int(flat.find(*_BACKWARD_ENDS)[stage, step.microbatch])
        last = flat.action(at)
        refuse(flat, at, last, step, f"{last} lacks {step} after it, on rank {rank}: every stage takes every update")
    if len(extra := np.flatnonzero(~np.isin(found, wanted))):
        index = int(steps[extra[0]])
        step = flat.action(index)
        refuse(flat, index, step, "no update", f"{step} belongs to no update of the other stages")


def _after_backwards(flat: Flat, steps: Row, done: Row) -> None:
    """So many backwards come before each STEP as its update has, with all updates before it."""
    if (k := first(done != flat.microbatch[steps] + 1)) is not None:
        step = flat.action(int(steps[k]))
        needs = step._replace(op=Op.B)
        sentence = f"{step} must follow {needs}, but comes after {int(done[k])} backwards of its stage"
        refuse(flat, int(steps[k]), step, needs, sentence)


def _each_reduced(flat: Flat, here: Row, done: Row) -> None:
    """One REDUCE between the last backward of each update and its STEP; `done`: backwards up to each of `here`."""
    ends = flat.having(Op.REDUCE, Op.STEP)[here]
    found, backwards = flat.op[here][ends], done[ends]
    pairs = np.tile([int(Op.REDUCE), int(Op.STEP)], -(-len(found) // 2))[: len(found)]
    wrong = found != pairs
    wrong[:-1] |= (found[:-1] == Op.REDUCE) & (backwards[:-1] != backwards[1:])
    if (k := first(wrong)) is None:
        return
    index = int(here[ends][k])
    action = flat.action(index)
    blocker = Action(action.stage, Op.STEP if action.op is Op.REDUCE else Op.REDUCE)
    sentence = f"{action}: every update has one REDUCE, between its last backward and its STEP"
    refuse(flat, index, action, blocker, sentence)


def _readable(flat: Flat) -> None:
    """Versions are told for every (stage, micro-batch), and none is newer than what there is."""
    versions = flat.program.versions
    if versions is None:
        return
    newest = newest_versions(flat.program)
    assert versions.shape == newest.shape, "a version for every stage and micro-batch"
    if (cell := first((versions < 0) | (versions > newest))) is not None:
        stage, microbatch = divmod(cell, newest.shape[1])
        action, wanted = Action(stage, Op.F, microbatch), int(versions[stage, microbatch])
        there = int(newest[stage, microbatch])
        at = int(flat.find(Op.F)[stage, microbatch])
        refuse(
            flat, at, action, f"version {wanted}",
            f"{action} would read version {wanted} of the weights; {there} updates of its stage come before it",
        )  # fmt: skip
