"""PipeDream: 1F1B that never drains, with an update after every backward (Narayanan et al., SOSP 2019, section 3.3).

There is no bubble once the pipeline is full, but this is not the synchronous optimisation: a gradient is computed with
weights that are P-1-s updates old on stage s. A micro-batch's backward uses the very weights its forward used (weight
stashing), so P-s versions of them are kept. With vertical sync every stage reads the version that was newest when the
micro-batch entered the first one: P-1 updates old everywhere, and P versions on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.plan.actions import Program
from engine.plan.schedules.asynchronous import unflushed
from engine.plan.schedules.registry import Stream, schedule
from engine.plan.updates import newest_versions


def _stream(ranks: int, updates: Sequence[int], vertical_sync: bool = False) -> Program:
    program = unflushed("pipedream", ranks, updates)
    if not vertical_sync:
        return program
    entered = newest_versions(program)[:1]  # later stages have taken as many updates at least
    return replace(program, versions=np.repeat(entered, program.stages, axis=0))


def _requires(ranks: int, microbatches: int, vertical_sync: Any = False) -> str | None:
    if isinstance(vertical_sync, bool):
        return None
    return f"schedule.vertical_sync={vertical_sync!r} is not possible: it must be true or false"


@schedule(
    "pipedream",
    "asynchronous: 1F1B without a flush, an update after every micro-batch, weights P-1-s updates old",
    requires=_requires,
    stream=Stream(_stream, per_update=lambda microbatches: 1),
)
def pipedream(ranks: int, microbatches: int, *, vertical_sync: bool = False) -> Program:
    """Build PipeDream.

    P=3, M=5; a window of M updates (a run's program goes on from one drain to the next):

    rank 0 | F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4      an update after every B
    rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .
    rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .
    """
    return _stream(ranks, [1] * microbatches, vertical_sync)
