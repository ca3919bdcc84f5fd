"""Channels and groups of a whole run are made by their members alone, in one order, however late some are (C015)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from harness import settings
from workers import RUNS, Run

from engine.job import Job
from engine.pipeline.communicators import Communicators
from engine.prepare.prepare import prepare
from engine.settings import AllReduceSettings
from engine.training.connections import connections
from engine.transport import Edge, Transport

STARTS = 2


class Late:
    """A transport whose rank comes late to everything that is opened, and writes it down."""

    def __init__(self, transport: Transport, chance: random.Random) -> None:
        self._transport, self._chance = transport, chance
        self.groups: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def open(self, edges: Sequence[Edge]) -> None:
        time.sleep(self._chance.random() * 0.01)
        self._transport.open(edges)

    def open_group(self, members: Sequence[int], label: str, backend: bool = False) -> None:
        time.sleep(self._chance.random() * 0.01)
        self.groups.append((label, *members))
        self._transport.open_group(members, label, backend)


def started(job: Job, seed: int) -> Callable[[Transport], tuple[Late, list[float]]]:
    """What a rank does: open everything, then sum 1 over its pipeline and over the copies of its stage."""

    def main(transport: Transport) -> tuple[Late, list[float]]:
        late = Late(transport, random.Random(f"{seed} {transport.rank}"))
        wiring = Communicators(connections(job), late)
        pipeline, copies, count = (torch.ones(1, dtype=torch.float64) for _ in range(3))
        done = wiring.sum_counts(count)
        wiring.sum_over_pipeline(pipeline)
        for collective in wiring.reduction.values():
            collective.all_reduce(copies)
        done()
        return late, [float(pipeline), float(copies), float(count)]

    return main


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(
    ("ranks", "replicas", "allreduce"),
    [(2, 2, "native"), (3, 2, "native"), (2, 3, "native"), (3, 3, "ring"), (1, 4, "native"), (4, 1, "ring")],
)
@pytest.mark.slow(keep=2)
def test_a_run_always_starts(ranks: int, replicas: int, allreduce: str, run: Run) -> None:
    job = prepare(settings("1f1b", ranks, 4, replicas, allreduce=AllReduceSettings(allreduce)), ".", ".")
    for seed in range(STARTS):
        found = run(job.world, started(job, seed))
        for rank, (late, sums) in enumerate(found):
            last = rank % ranks == ranks - 1
            assert sums == [ranks, replicas, replicas if last else 1]
            assert all(rank in members for _, *members in late.groups)
        for (a, one), (b, other) in combinations(enumerate(late for late, _ in found), 2):
            both = [group for group in one.groups if b in group[1:]]
            assert both == [group for group in other.groups if a in group[1:]]
