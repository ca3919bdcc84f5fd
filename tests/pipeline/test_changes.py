"""Layers that change what they hold: equal to one process, or refused by name before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from harness import close, equal, plain, run_threads, settings

from engine.prepare.prepare import prepare


def wanted(
    target: str, schedule: str, ranks: int = 2, microbatches: int = 4, replicas: int = 1, **keywords: Any
) -> Any:
    model = {"_target_": f"peculiar.{target}", "loss": {"_target_": "toys.TokenLoss"}, **keywords}
    data = {"_target_": "toys.Words" if target == "bounded" else "toys.Tokens"}
    return settings(schedule, ranks, microbatches, replicas, model=model, data=data)


@pytest.mark.parametrize(("schedule", "ranks"), [("naive", 2), ("gpipe", 1), ("1f1b", 3), ("zb_h1", 2)])
@pytest.mark.slow(keep=3)
def test_an_embedding_with_a_largest_norm_equals_one_process(schedule: str, ranks: int) -> None:
    run = wanted("bounded", schedule, ranks)
    ran, (state, losses) = run_threads(run), plain(run, microbatched=True)
    assert ran.losses() == losses and equal(ran.state(), state)
    assert float(state["words.weight"][:3].norm(dim=1).max()) < 0.6 < float(state["words.weight"].norm(dim=1).max())
    close(ran.state(), plain(run, microbatched=False)[0])


@pytest.mark.parametrize(
    ("schedule", "replicas"), [("gpipe", 2), ("dualpipe", 1), ("chimera", 1), ("pipedream_2bw", 1)]
)
@pytest.mark.parametrize(("target", "keywords"), [("bounded", {}), ("quantized", {"how": "weight"})])
def test_copies_of_a_parameter_that_changes_are_refused(
    schedule: str, replicas: int, target: str, keywords: dict[str, Any]
) -> None:
    layer, name = ("words", "weight") if target == "bounded" else ("first", "codes")
    said = f"layer '{layer}' changes its parameter {name} in its forward .* use data_parallel.replicas=1"
    with pytest.raises(ValueError, match=said):
        prepare(wanted(target, schedule, 2, 4, replicas, **keywords), ".", ".")


@pytest.mark.parametrize("how", ["buffer", "weight", "data", "attribute"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_change_of_what_an_earlier_backward_needs_is_refused(how: str, schedule: str) -> None:
    said = f"layer 'first' changes codes in place .* schedule {schedule} runs .* use a copy in the forward"
    with pytest.raises(ValueError, match=said):
        prepare(wanted("quantized", schedule, how=how), ".", ".")


@pytest.mark.parametrize("how", ["buffer", "weight", "data"])
@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), [("naive", 2, 4), ("gpipe", 2, 1)])
@pytest.mark.slow(keep=2)
def test_it_may_be_changed_where_no_backward_is_left_to_come(
    how: str, schedule: str, ranks: int, microbatches: int
) -> None:
    run = wanted("quantized", schedule, ranks, microbatches, how=how)
    ran, (state, losses) = run_threads(run), plain(run, microbatched=True)
    assert ran.losses() == losses and equal(ran.state(), state)


@pytest.mark.parametrize("how", ["copy", "replaced", "unused"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.slow(keep=3)
def test_a_copy_may_be_used(how: str, schedule: str) -> None:
    run = wanted("quantized", schedule, how=how)
    ran, (state, losses) = run_threads(run), plain(run, microbatched=True)
    assert ran.losses() == losses and equal(ran.state(), state)


def test_the_last_stage_of_1f1b_has_one_micro_batch_in_flight() -> None:
    model = {"_target_": "peculiar.quantized_last", "loss": {"_target_": "toys.TokenLoss"}}
    run = settings("1f1b", 2, 4, model=model)
    ran, (state, losses) = run_threads(run), plain(run, microbatched=True)
    assert ran.losses() == losses and equal(ran.state(), state)
    with pytest.raises(ValueError, match="layer 'codes' changes codes in place"):
        prepare(settings("gpipe", 2, 4, model=model), ".", ".")


@pytest.mark.parametrize(("schedule", "replicas"), [("gpipe", 2), ("dualpipe", 1), ("pipedream", 1)])
def test_running_statistics_are_allowed(schedule: str, replicas: int) -> None:
    model = {"_target_": "toys.normed", "loss": {"_target_": "toys.TokenLoss"}}
    assert prepare(settings(schedule, 2, 4, replicas, model=model), ".", ".")


@pytest.mark.parametrize(("schedule", "replicas"), [("gpipe", 2), ("dualpipe", 1)])
def test_synchronised_statistics_are_refused_where_there_is_something_to_synchronise(
    schedule: str, replicas: int
) -> None:
    said = (
        r"layer 'norm' holds a SyncBatchNorm \(1\), whose statistics are not yet taken over replicas .* use BatchNorm"
    )
    with pytest.raises(ValueError, match=said):
        prepare(wanted("synchronised", schedule, 2, 4, replicas), ".", ".")


def test_alone_they_are_plain_statistics() -> None:
    run = wanted("synchronised", "1f1b")
    ran, (state, losses) = run_threads(run), plain(run, microbatched=True)
    assert ran.losses() == losses and equal(ran.state(), state)
