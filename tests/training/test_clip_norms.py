"""Clipping by other norms than the second, over ranks, replicas and copies of a stage: that of one process (C031)."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Ran, close, equal, plain, run_threads, settings

from engine.cli.config import from_plain

MLP = {"_target_": "toys.mlp", "layers": 8, "loss": {"_target_": "toys.TokenLoss"}}
POWERS = pytest.mark.parametrize("power", [1.0, 2.0, 3.0, None], ids=["1", "2", "3", "inf"])


def logged(ran: Ran) -> list[float]:
    """The norm that rank 0 logs, step by step."""
    steps = sorted((r.meta for r in ran.of("step") if r.meta["rank"] == 0), key=lambda meta: meta["step"])
    return [meta["grad_norm"] for meta in steps]


@POWERS
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.slow(keep=2)
def test_weights_are_bitwise_those_of_one_process(schedule: str, power: float | None) -> None:
    wanted = settings(schedule, 2, 4, model=MLP, clip_norm=0.02, clip_norm_type=power)
    state, _ = plain(wanted, microbatched=True)
    assert equal(run_threads(wanted).state(), state)


@POWERS
@pytest.mark.parametrize("schedule", ["gpipe", "chimera"])
@pytest.mark.slow(keep=1)
def test_replicas_and_copies_are_counted_once(schedule: str, power: float | None) -> None:
    wanted = settings(schedule, 2, 4, 2, model=MLP, clip_norm=0.02, clip_norm_type=power)
    state, _ = plain(wanted, microbatched=True)
    close(run_threads(wanted).state(), state)


@pytest.mark.slow
def test_the_norm_that_is_logged_is_the_one_that_clips() -> None:
    """The largest element is less than the 2-norm, that less than the sum; each is the same on every layout."""
    found: dict[Any, list[float]] = {}
    for power in (1.0, 2.0, None):
        alone, cut = (
            logged(run_threads(settings("gpipe", ranks, 4, model=MLP, clip_norm=1e9, clip_norm_type=power)))
            for ranks in (1, 2)
        )
        assert cut == (alone if power is None else pytest.approx(alone, rel=1e-12))
        found[power] = alone
    assert all(a > b > c > 0 for a, b, c in zip(found[1.0], found[2.0], found[None], strict=True))


@pytest.mark.parametrize(("given", "kept"), [(1, 1.0), (2, 2.0), (float("inf"), None), ("inf", None), (None, None)])
def test_ways_to_write_the_power(given: Any, kept: float | None) -> None:
    common = {"mode": "plan", "schedule": {"name": "gpipe"}, "partition": {"name": "model"}}
    assert from_plain({**common, "train": {"clip_norm_type": given}}).train.clip_norm_type == kept


@pytest.mark.parametrize("given", [0, -1, "two", float("nan")])
def test_what_is_no_power_is_refused(given: Any) -> None:
    common = {"mode": "plan", "schedule": {"name": "gpipe"}, "partition": {"name": "model"}}
    with pytest.raises(ValueError, match=f"train.clip_norm_type={given}"):
        from_plain({**common, "train": {"clip_norm_type": given}})
