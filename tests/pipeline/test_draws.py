"""What replicas, stages and the processes of a loader draw: each its own, and what belongs together alike (C048)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_threads, settings
from torch import Tensor

from engine.job import Job
from engine.pipeline.batches.batch import ReplicaBatch
from engine.prepare.prepare import prepare
from engine.telemetry.trace import Tracer
from engine.training.samples.inputs import BatchStream
from engine.training.worker import Worker

CPU = torch.device("cpu")


def masks() -> dict[int, list[Tensor]]:
    """What the first dropout lets through, by world rank, in each micro-batch of two steps of equal samples."""
    model = {"_target_": "toys.mlp4", "p": 0.5, "loss": {"_target_": "toys.TokenLoss"}}
    wanted = settings("gpipe", 2, 2, replicas=2, steps=2, model=model, data={"_target_": "toys.Same"})
    found: dict[int, list[Tensor]] = {}

    def watch(worker: Worker) -> None:
        if 0 in worker.stages:
            seen = found.setdefault(worker.world_rank, [])
            first = worker.stages[0].layers[0].module
            first.register_forward_hook(lambda module, given, output: seen.append(output.detach() == 0))

    run_threads(wanted, watch)
    return found


def test_equal_samples_meet_other_masks_in_every_replica_microbatch_and_step_and_the_same_in_a_rerun() -> None:
    found, again = masks(), masks()
    drawn = [mask for rank in sorted(found) for mask in found[rank]]
    assert sorted(found) == [0, 2] and len(drawn) == 2 * 2 * 2 and all(mask.any() for mask in drawn)
    assert all(not torch.equal(a, b) for k, a in enumerate(drawn) for b in drawn[k + 1 :])
    assert all(torch.equal(a, b) for rank, own in found.items() for a, b in zip(own, again[rank], strict=True))


def spoil(rank: int) -> None:
    """The default generators as a rank may find them: equal on some, other ones on others."""
    torch.manual_seed(rank % 2)
    np.random.seed(rank // 2)
    random.seed(rank)


def shares(job: Job, workers: int, steps: int) -> dict[tuple[int, int], ReplicaBatch]:
    """By (world rank, step), each rank in a process state of its own."""
    job = replace(job, settings=replace(job.settings, data={"_target_": "toys.Augmented", "workers": workers}))
    found = {}
    for rank in range(job.world):
        loads = BatchStream(job, rank, CPU, Tracer(), lambda m: m)
        for step in range(steps):
            spoil(rank + step)
            found[rank, step] = loads.take(step)
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow(keep=1)
def test_augmentations_agree_within_a_replica_and_differ_between_them(workers: int) -> None:
    steps = 3
    job = prepare(settings("gpipe", 2, 2, replicas=2, steps=steps, global_batch_size=8), ".", ".")
    found, again = shares(job, workers, steps), shares(job, workers, steps)
    drawn = []
    for replica in (0, 1):
        for step in range(steps):
            first, last = found[2 * replica, step], found[2 * replica + 1, step]
            assert torch.equal(first.given, last.target)  # the two ends of a pipeline see one sample
            assert torch.equal(first.given, again[2 * replica, step].given)
            drawn += first.given.flatten().tolist()
    assert len(set(drawn)) == len(drawn) == 2 * steps * 4 * 3  # every sample, replica, step and generator its own


def test_loading_while_others_draw_takes_nothing_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads share torch's default generator; both ends still see the same samples."""
    ends: dict[tuple[int, int], Any] = {}
    take = BatchStream.take

    def noted(self: BatchStream, step: int) -> ReplicaBatch:
        share = take(self, step)
        ends[self._replica * 2 + self._rank, step] = share
        return share

    monkeypatch.setattr(BatchStream, "take", noted)
    model = {"_target_": "toys.mlp4", "width": 3, "classes": 3, "p": 0.5, "loss": {"_target_": "torch.nn.MSELoss"}}
    run_threads(settings("1f1b", 2, 2, replicas=2, steps=4, model=model, data={"_target_": "toys.Augmented"}))
    assert len(ends) == 16
    for replica in (0, 1):
        for step in range(4):
            assert torch.equal(ends[2 * replica, step].given, ends[2 * replica + 1, step].target)
