"""How long a run is and what its batches are cut into: from the settings and the number of samples alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.pipeline.batches.microbatch import passes, sizes
from engine.plan.programs import StepPrograms
from engine.plan.schedules import SCHEDULES
from engine.settings import Settings
from engine.training.samples.batches import Batches


def per_update(settings: Settings) -> int:
    """Micro-batches of a pass through the pipeline, or of one update of an asynchronous schedule."""
    return SCHEDULES[settings.schedule["name"]].per_update(settings.pipeline.microbatches)


def batches_of(settings: Settings, samples: int) -> Batches:
    """The training's batches, in no particular order."""
    drop, replicas = bool(settings.data.get("drop_last", False)), settings.data_parallel.replicas
    return Batches(samples, settings.train.global_batch_size, replicas, 0, shuffle=False, drop_last=drop)


def steps_of(settings: Settings, batches: Batches) -> int:
    """Optimizer steps of the run."""
    return batches.steps(settings.train.steps, settings.train.epochs)


def training_pieces(settings: Settings, programs: StepPrograms, samples: int) -> list[list[int]]:
    """Every list of micro-batch sizes that a pass of the training can have, each once."""

    def legal(microbatches: int) -> int:
        return microbatches if asynchronous else programs.compute(microbatches).microbatches

    asynchronous = SCHEDULES[settings.schedule["name"]].stream is not None
    batches = batches_of(settings, samples)
    steps, accumulate = steps_of(settings, batches), settings.train.accumulate
    return _pieces(batches, steps, accumulate, per_update(settings), legal)


def evaluation_pieces(settings: Settings, samples: int) -> list[list[int]]:
    """The same of an evaluation; none where there are no samples for one."""
    size = settings.eval.batch_size or settings.train.global_batch_size
    batches = Batches(samples, size, settings.data_parallel.replicas, 0, shuffle=False)
    return _pieces(batches, batches.per_epoch, 1, settings.pipeline.microbatches, lambda m: m) if samples else []


def _pieces(
    batches: Batches, steps: int, accumulate: int, microbatches: int, legal: Callable[[int], int]
) -> list[list[int]]:
    """Every list of micro-batch sizes that a pass over the first `steps` of these batches can have, each once."""
    found: dict[tuple[int, ...], list[int]] = {}
    for count in {batches.count(index) for index in (0, batches.per_epoch - 1) if index < steps}:
        for share in set(sizes(count, batches.replicas)):
            for piece in passes(share, accumulate, microbatches, legal):
                found.setdefault(tuple(piece), piece)
    return list(found.values())


def whole_run(settings: Settings, samples: int) -> dict[str, Any] | None:
    """The scheduler's keywords, with `T_max` at the run's steps where it is unset: one fall from begin to end."""
    given = settings.lr_scheduler
    if not given or given.get("T_max", 0) is not None:
        return given
    return given | {"T_max": steps_of(settings, batches_of(settings, samples))}
