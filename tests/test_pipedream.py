"""Asynchronous PipeDream trains as its papers say: bit for bit the delayed updates of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from delayed import delayed
from harness import ADAM, SGD, Ran, run_threads, settings
from test_parity import equal

from engine.settings import Settings

PIPEDREAM: dict[str, Any] = {"name": "pipedream"}
VERTICAL = {"name": "pipedream", "vertical_sync": True}
TWO_BUFFERS = {"name": "pipedream_2bw"}
DROPOUT = {"_target_": "toys.mlp4", "p": 0.3, "loss": {"_target_": "toys.TokenLoss"}}

each = pytest.mark.parametrize("schedule", [PIPEDREAM, VERTICAL, TWO_BUFFERS], ids=["plain", "vertical", "2bw"])
either = pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])


def asynchronous(schedule: dict[str, Any], ranks: int, replicas: int = 1, **changes: Any) -> Settings:
    """8 updates of 10 samples, of which many do not count; micro-batches of uneven sizes where there are several."""
    defaults = {
        "steps": 8,
        "global_batch_size": 10,
        "data": {"_target_": "toys.Tokens", "blank": 3, "samples": 60},
    }
    return replace(settings("gpipe", ranks, 4, replicas, **defaults | changes), schedule=schedule)


def compare(ran: Ran, wanted: Settings) -> None:
    expected, losses = delayed(wanted)
    assert equal(ran.state(), expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-12)


@either
@each
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_the_delayed_updates_of_one_process_bitwise(
    ranks: int, schedule: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """With dropout; the epoch ends with update 6."""
    wanted = asynchronous(schedule, ranks, optimizer=optimizer, model=DROPOUT)
    compare(run_threads(wanted), wanted)
