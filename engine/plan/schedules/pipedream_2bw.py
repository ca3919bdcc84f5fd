"""PipeDream-2BW: double-buffered weights (Narayanan et al., ICML'21, arXiv 2006.09503, section 3.1).

1F1B that never drains, with an update after every M micro-batches. All stages compute an update with the weights of one
update before, W(t+1) = W(t) - rate x gradient at W(t-1): one update old everywhere, and two versions whatever the
depth. This is not the synchronous optimisation. It takes M >= P: with fewer micro-batches the weights of one update
before would not be there yet when an update's first micro-batch enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.plan.actions import Program
from engine.plan.schedules.asynchronous import unflushed
from engine.plan.schedules.registry import Stream, schedule
from engine.plan.updates import newest_versions


def _stream(ranks: int, updates: Sequence[int]) -> Program:
    """Updates of any size: after a short one (the end of an epoch) the newest weights there are may be older still."""
    program = unflushed("pipedream_2bw", ranks, updates)
    one_before = np.maximum(np.repeat(np.arange(len(updates)), updates) - 1, 0)
    versions = np.minimum(one_before, newest_versions(program)[0])  # the first stage is the last to update
    return replace(program, versions=np.repeat(versions[None], program.stages, axis=0))


def _requires(ranks: int, microbatches: int) -> str | None:
    if microbatches >= ranks:
        return None
    return f"pipeline.microbatches must be at least pipeline.ranks: {ranks}, {ranks + 1}, {ranks + 2}, ..."


@schedule(
    "pipedream_2bw",
    "asynchronous: 1F1B without a flush, an update after every M micro-batches, weights one update old",
    requires=_requires,
    stream=Stream(_stream, per_update=lambda microbatches: microbatches),
)
def pipedream_2bw(ranks: int, microbatches: int) -> Program:
    """Build PipeDream-2BW.

    P=2, M=2; two updates (a run's program goes on from one drain to the next, this one is of the first alone):

    rank 0 | F0 F1 .  B0 F2 B1 F3 B2 .  B3      an update after B1 and B3; F2 and F3 read what F0 and F1 read
    rank 1 | .  F0 B0 F1 B1 F2 B2 F3 B3 .
    """
    return _stream(ranks, [microbatches])
