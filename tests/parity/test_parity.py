"""Law 1: for any ranks, micro-batches, replicas and schedule, training equals one plain process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from harness import ADAM, SGD, close, equal, plain, run_threads, settings

from engine.settings import Settings

SCHEDULES = ("naive", "gpipe", "1f1b")
RANKS = (1, 2, 3, 4)
MICROBATCHES = (1, 2, 3, 5, 8)


def clipped(
    ranks: int, microbatches: int, replicas: int, optimizer: dict[str, object], global_batch_size: int, samples: int
) -> Settings:
    """Clipping on, and every second sample without a target that counts."""
    return settings(
        "gpipe",
        ranks,
        microbatches,
        replicas,
        optimizer=optimizer,
        clip_norm=0.05,
        global_batch_size=global_batch_size,
        data={"_target_": "toys.Tokens", "blank": 2, "samples": samples},
    )


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(("ranks", "microbatches"), list(itertools.product(RANKS, MICROBATCHES)))
@pytest.mark.slow(keep=7, most=20)
def test_equals_one_process(ranks: int, microbatches: int, optimizer: dict[str, object]) -> None:
    """18 samples (uneven micro-batches), ignored targets, a blank sample, clipping on; three schedules, R = 1."""
    base = clipped(ranks, microbatches, 1, optimizer, global_batch_size=18, samples=64)
    expected, losses = plain(base, microbatched=True)
    whole, _ = plain(base, microbatched=False)
    for schedule in SCHEDULES:
        ran = run_threads(settings_like(base, schedule))
        assert equal(ran.state(), expected), schedule
        close(ran.state(), whole)
        assert ran.losses() == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(("ranks", "microbatches"), list(itertools.product(RANKS, MICROBATCHES)))
@pytest.mark.slow(keep=1, most=20)
def test_replicas_equal_one_process(ranks: int, microbatches: int, optimizer: dict[str, object]) -> None:
    """R = 2, 19 samples: replicas with different shares, a short last batch after two steps."""
    base = clipped(ranks, microbatches, 2, optimizer, global_batch_size=19, samples=40)
    expected, losses = plain(base, microbatched=True)
    states = []
    for schedule in SCHEDULES:
        ran = run_threads(settings_like(base, schedule))
        assert equal(ran.state(0), ran.state(1)), schedule
        close(ran.state(), expected)
        assert ran.losses() == pytest.approx(losses, rel=1e-9)
        states.append(ran.state())
    assert equal(states[0], states[1])
    assert equal(states[0], states[2])


def settings_like(base: Settings, schedule: str) -> Settings:
    return replace(base, schedule={"name": schedule})
