"""Layers that run themselves again in their backward (torch.utils.checkpoint): the same masks, once, and few bytes."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Ran, equal, plain, run_threads, settings

BYTES = 4 * 3 * 8 * 8  # of an activation of a micro-batch: 4 samples of 3 vectors of 8 numbers
HEADER = 128  # of a message, in whose memory a received activation lies


def ran_with(reentrant: bool, schedule: str, ranks: int = 2, replicas: int = 1, **changes: Any) -> Ran:
    model = {"_target_": "peculiar.hesitant", "reentrant": reentrant, "loss": {"_target_": "toys.TokenLoss"}}
    return run_threads(
        settings(schedule, ranks, 4, replicas, model=model, global_batch_size=16 * replicas, steps=2, **changes)
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_1f1b"])
@pytest.mark.slow(keep=1)
def test_masks_drawn_again_are_those_of_the_forward(reentrant: bool, schedule: str) -> None:
    """Beside threads that draw at the same time."""
    ran = ran_with(reentrant, schedule)
    state, losses = plain(ran.job.settings, microbatched=True)
    assert ran.losses() == losses and equal(ran.state(), state)


@pytest.mark.parametrize("schedule", ["pipedream_2bw"])
def test_masks_drawn_again_with_several_versions_of_the_weights(schedule: str) -> None:
    first, again = (ran_with(False, schedule, 3) for _ in range(2))
    assert first.losses() == again.losses() and equal(first.state(), again.state())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.slow(keep=2)
def test_counting_what_a_forward_leaves_runs_no_layer_again(reentrant: bool, schedule: str) -> None:
    """Each layer twice for each micro-batch, and of each its input alone is kept."""
    ran = ran_with(reentrant, schedule)
    stages = [stage for worker in ran.workers.values() for stage in worker.stages.values()]
    again = {x.number: x.module.block.ran for stage in stages for x in stage.layers if x.name.startswith("again")}
    assert again == dict.fromkeys(range(1, 7), 2 * 4 * 2)
    kept = {number: nbytes for stage in stages for number, nbytes in stage.saved_by_layer().items()}
    # The first layer keeps its input and its tanh, which is the input of the next.
    assert [kept[number] for number in range(7)] == [2 * BYTES, 0, BYTES, BYTES, BYTES + HEADER, BYTES, BYTES]
