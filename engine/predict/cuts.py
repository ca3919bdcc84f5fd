"""How a model's layers become stages in a prediction, and what each rank then keeps in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.plan.actions import Op, Placement, Program, unpack
from engine.plan.partition import partition
from engine.predict.measured import Floats, Measured
from engine.tables import counted


@dataclass(frozen=True, eq=False)
class Cut:
    """A model cut into stages. S: stages, L: layers.

    `parts` [S, L]: what part of each layer a stage has; `after` [S]: the layer that ends it. `split`: the first layer
    of each stage, or None where layers are cut in parts themselves.
    """

    parts: Floats
    after: tuple[int, ...]
    split: tuple[int, ...] | None


def cut_of(base: Measured, stages: int, split: Sequence[int] | None = None) -> Cut:
    """Cut the model into so many stages: by `split`, else as the run's, else as even as measured layers allow.

    A model that is made of as many layers as there are stages has more of them then, each taken to be an equal part.
    Raises ValueError where there are too few layers, or where one cannot end a stage.
    """
    count = len(base.names)
    if split is None and stages == len(base.split):
        split = base.split
    if split is None and base.made_to_measure and stages > count and stages % count == 0:
        times = stages // count
        parts = np.repeat(np.eye(count), times, axis=0) / times
        return Cut(parts, tuple(stage // times for stage in range(stages)), None)
    if split is None:
        if stages > count:
            raise ValueError(f"it has {counted(stages, 'stage')}, and the model only {counted(count, 'layer')}")
        split = even(base, stages)
    parts = np.zeros((stages, count))
    for stage, (first, end) in enumerate(zip(split, [*split[1:], count], strict=True)):
        parts[stage, first:end] = 1
    after = tuple(end - 1 for end in [*split[1:], count])
    for layer in after[:-1]:
        if base.sends[layer] is None:
            raise ValueError(f"a stage cannot end behind layer {base.names[layer]}: what it returns cannot be sent")
    return Cut(parts, after, tuple(split))


def even(base: Measured, stages: int) -> tuple[int, ...]:
    """The split that makes the slowest stage as quick as can be, by what layers took forward and backward."""
    whole = (base.layers[:, Op.F] + base.layers[:, Op.B]).mean(axis=0)
    return partition(whole.tolist(), stages)


def held(placement: Placement, stages: Floats) -> Floats:
    """Sum over each rank what its stages have, each copy of a stage whole: [P]."""
    return np.array([sum(stages[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)])


def memory(base: Measured, program: Program, cut: Cut, rows: Sequence[int], recompute: bool) -> tuple[Floats, Floats]:
    """Bytes by rank: what is there all the time, and the most that forwards leave for backwards at once: [P] each.

    A micro-batch is kept until its weight gradients are done. With `recompute` only what enters a stage is, and all the
    rest again while its backward runs. `rows`: samples of each micro-batch.
    """
    part = np.array(rows) / base.largest
    full = cut.parts @ base.kept
    kept = full
    if recompute:
        sends = [base.sends[layer] for layer in cut.after[:-1]]
        kept = np.minimum(full, [0.0, *(0.0 if each is None else each[0] for each in sends)])
    peaks = np.zeros(program.ranks)
    for rank, row in enumerate(program.rows):
        op, stage, microbatch, _ = unpack(row)
        change = np.where(op == Op.F, 1, np.where(np.isin(op, (Op.B, Op.W)), -1, 0))
        after = np.cumsum(change * kept[stage] * part[microbatch])
        again = np.isin(op, (Op.B, Op.I)) * (full - kept)[stage] * part[microbatch]
        before = np.concatenate([[0.0], after[:-1]])
        peaks[rank] = max(after.max(initial=0.0), (before + again).max(initial=0.0))
    lasting = base.weights + base.buckets * base.reduces(program)
    return held(program.placement, cut.parts @ lasting), peaks
