"""Which updates an asynchronous run makes between two drains, and the proven program of each such window."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from engine.pipeline.batches.microbatch import sizes
from engine.plan.actions import Program
from engine.plan.programs import StepPrograms, Updates
from engine.plan.schedules import SCHEDULES
from engine.settings import Settings
from engine.training.samples.batches import Batches

MOST_PAIRS = 2**20  # of a rank and a micro-batch in one window: its program is proven as a whole


def window_lengths(steps: int, drains: Collection[int | None], start: int = 0) -> tuple[int, ...]:
    """How many updates lie between the drains of a run from step `start` to `steps`.

    It drains at its end, and after every so many steps as each number of `drains` says (None: never).
    """
    every = [each for each in drains if each]
    ends = {step for each in every for step in range(start - start % each + each, steps, each)}
    points = [start, *sorted(ends), steps]
    return tuple(b - a for a, b in pairwise(points) if b > a)


def drains_of(settings: Settings, batches: Batches, evaluates: bool) -> tuple[int | None, ...]:
    """After how many steps at a time a run drains: for evaluations, and for checkpoints."""
    epochs = settings.checkpoint.every_epochs
    return (
        settings.eval.every if evaluates else None,
        settings.checkpoint.every_steps,
        None if epochs is None else epochs * batches.per_epoch,
    )


def updates_of(batches: Batches, replica: int, first: int, count: int, most: int) -> Updates:
    """Micro-batches of each update from step `first` on: `most`, or as many as there are samples."""
    counts = (batches.count(step) for step in range(first, first + count))
    return tuple(min(most, sizes(samples, batches.replicas)[replica]) for samples in counts)


def stream_programs(
    settings: Settings, programs: StepPrograms, batches: Batches, windows: Sequence[int], start: int = 0
) -> dict[Updates, Program]:
    """The lowered and verified program of every window that a replica can have. The first one's comes first.

    Raises ValueError where a window is too long, and where a replica has no sample in some update.
    """
    most = SCHEDULES[settings.schedule["name"]].per_update(settings.pipeline.microbatches)
    proven, streams = programs.streams(), {}
    for first, count in zip(np.cumsum([start, *windows]).tolist(), windows, strict=False):
        for replica in range(batches.replicas):
            updates = updates_of(batches, replica, first, count, most)
            if updates not in streams:
                _check(settings, updates)
                streams[updates] = proven[updates]
    return streams


def _check(settings: Settings, updates: Updates) -> None:
    name, ranks = settings.schedule["name"], settings.pipeline.ranks
    if min(updates) == 0:
        raise ValueError(
            f"the last batch of an epoch leaves one of data_parallel.replicas={settings.data_parallel.replicas} "
            f"without samples, and with schedule {name} each replica needs one in every update: choose "
            "data.drop_last=true, a train.global_batch_size that divides the number of samples, or fewer replicas"
        )
    if ranks * sum(updates) > MOST_PAIRS:
        raise ValueError(
            f"schedule {name} would go through {sum(updates):,} micro-batches on pipeline.ranks={ranks} without a "
            f"drain; {MOST_PAIRS // ranks:,} are possible: drain more often with eval.every, at most "
            f"{max(1, MOST_PAIRS // ranks // max(updates)):,}, or lower train.steps or train.epochs"
        )
