"""Law 1 over the whole field: every synchronous schedule, ranks, micro-batches, replicas, SGD and Adam.

One plain process per (micro-batches, replicas, optimizer) is what all of them must equal: how many ranks there are, and
in which order they work, must not show. Clipping is on, every second sample has no target that counts, and no number of
micro-batches here divides the batch.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from harness import ADAM, SGD, close, equal, plain, run_threads, settings
from program_strategies import EVERY

from engine.plan.features import COPIES, SPLIT, VERSIONS, features
from engine.plan.schedules import SCHEDULES, build
from engine.plan.verify import peak_in_flight
from engine.settings import Settings

OPTIMIZERS = {"sgd": SGD, "adam": ADAM}
RANKS, REPLICAS, MICROBATCHES = (2, 3, 4), (1, 2), (3, 4, 8)
NEEDS = {name: set(features(build(name, 4, 8))) for name in EVERY}
SYNCHRONOUS = [name for name, needs in NEEDS.items() if needs <= {SPLIT, COPIES}]


def defined(schedule: str, ranks: int) -> list[int]:
    return [m for m in MICROBATCHES if not SCHEDULES[schedule].complaint(ranks, m, {})]


def wanted(schedule: str, ranks: int, microbatches: int, replicas: int, optimizer: str) -> Settings:
    return settings(
        schedule,
        ranks,
        microbatches,
        replicas,
        model={"_target_": "toys.mlp", "layers": 8, "loss": {"_target_": "toys.TokenLoss"}},
        data={"_target_": "toys.Tokens", "blank": 2},
        optimizer=OPTIMIZERS[optimizer],
        clip_norm=0.05,
        global_batch_size=19,
        steps=2,
    )


@lru_cache
def expected(microbatches: int, replicas: int, optimizer: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses of one process that goes through the same micro-batches."""
    return plain(wanted("gpipe", 1, microbatches, replicas, optimizer), microbatched=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize(("schedule", "ranks"), [(s, p) for s in SYNCHRONOUS for p in RANKS if defined(s, p)])
@pytest.mark.slow(keep=2, most=60)
def test_equals_one_process(schedule: str, ranks: int, replicas: int, optimizer: str) -> None:
    """Bitwise with one replica and one copy of each stage; replicas equal each other; as many in flight as planned."""
    for microbatches in defined(schedule, ranks):
        ran = run_threads(wanted(schedule, ranks, microbatches, replicas, optimizer))
        state, losses = expected(microbatches, replicas, optimizer)
        if replicas == 1 and COPIES not in NEEDS[schedule]:
            assert equal(ran.state(), state)
        close(ran.state(), state)
        assert ran.losses() == pytest.approx(losses, rel=1e-12)
        for replica in range(1, replicas):
            assert equal(ran.state(0), ran.state(replica))
        peaks = peak_in_flight(build(schedule, ranks, microbatches))
        assert [worker.executor.peak_in_flight for _, worker in sorted(ran.workers.items())] == peaks * replicas


@pytest.mark.parametrize("microbatches", [3, 4, 6, 8, 10])
@pytest.mark.slow(keep=2)
def test_interleaving_takes_any_number_of_microbatches(microbatches: int) -> None:
    """Four ranks of two chunks; also where the number is no multiple of the ranks (CASES C010)."""
    ran = run_threads(wanted("interleaved_1f1b", 4, microbatches, 1, "sgd"))
    assert equal(ran.state(), expected(microbatches, 1, "sgd")[0])


def test_the_grid_leaves_no_schedule_out() -> None:
    """What is offered and not here is a file's program, or needs weight versions."""
    assert all(VERSIONS in NEEDS[name] for name in set(EVERY) - set(SYNCHRONOUS))
    assert len(SYNCHRONOUS) >= 14
    unfit = [(name, ranks) for name in SYNCHRONOUS for ranks in RANKS if not defined(name, ranks)]
    assert unfit == [("chimera", 3), ("dualpipe", 3)]  # they want an even number of ranks
