"""What a rank keeps from step to step, by hand: parameters, gradients, buckets, the optimizer's state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness import ADAM, SGD, Ran, run_threads, settings

from engine.settings import AllReduceSettings

PER_LAYER = (32 * 32 + 32) * 8  # a linear map of the model below, in float64
MODEL = {"_target_": "toys.mlp", "layers": 4, "width": 32, "loss": {"_target_": "toys.TokenLoss"}}
WIDE = {"model": MODEL, "data": {"_target_": "toys.Tokens", "width": 32}, "steps": 2}


def told(ran: Ran) -> list[dict[str, Any]]:
    """By world rank; each has told once."""
    metas = sorted((record.meta for record in ran.of("memory")), key=lambda meta: meta["rank"])
    assert [meta["rank"] for meta in metas] == list(range(ran.job.world))
    return metas


def parameter_bytes(ran: Ran, rank: int) -> int:
    return sum(p.nbytes for stage in ran.workers[rank].stages.values() for layer in stage.layers
               for p in layer.module.parameters())  # fmt: skip


def test_without_replicas_there_are_no_buckets() -> None:
    ran = run_threads(settings("1f1b", 2, 4, optimizer=ADAM, **WIDE))
    for rank, meta in enumerate(told(ran)):
        size = parameter_bytes(ran, rank)
        assert size >= PER_LAYER
        assert (meta["parameters"], meta["gradients"], meta["buckets"]) == (size, size, 0)
        scalars = meta["optimizer_state"] - 2 * size  # Adam's two numbers per parameter, and a count per tensor
        assert 0 <= scalars <= 64 * len(list(ran.workers[rank].update.parameters))


@pytest.mark.parametrize("optimizer", [SGD, {"_target_": "torch.optim.SGD", "lr": 0.1}], ids=["momentum", "plain"])
def test_replicas_reduce_in_buckets(optimizer: dict[str, Any]) -> None:
    ran = run_threads(settings("gpipe", 1, 2, replicas=2, optimizer=optimizer, **WIDE))
    for rank, meta in enumerate(told(ran)):
        size = parameter_bytes(ran, rank)
        assert meta["parameters"] == meta["gradients"] == size
        assert size <= meta["buckets"] <= size + 64 * 20  # presence flags and padding
        assert meta["optimizer_state"] == (size if "momentum" in optimizer else 0)


def test_a_divided_optimizer_is_kept_in_parts() -> None:
    """Parameters then lie in buffers with the padding of the buckets."""
    whole = run_threads(settings("gpipe", 1, 2, replicas=2, optimizer=SGD, **WIDE))
    wanted = settings("gpipe", 1, 2, replicas=2, optimizer=SGD, **WIDE)
    parts = told(run_threads(replace(wanted, shard_optimizer=True)))
    size = parameter_bytes(whole, 0)
    assert all(meta["gradients"] == size and meta["parameters"] == meta["buckets"] for meta in parts)
    assert sum(meta["optimizer_state"] for meta in parts) == pytest.approx(size, rel=0.05)
    server = told(run_threads(replace(wanted, allreduce=AllReduceSettings("parameter_server"))))
    assert server[0]["optimizer_state"] == pytest.approx(size, rel=0.05) and server[1]["optimizer_state"] == 0


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    def freeze(worker: Any) -> None:
        for stage in worker.stages.values():
            for parameter in stage.layers[0].module.parameters():
                parameter.requires_grad_(False)

    ran = run_threads(settings("gpipe", 2, 2, optimizer=SGD, **WIDE), freeze)
    for rank, meta in enumerate(told(ran)):
        frozen = sum(p.nbytes for stage in ran.workers[rank].stages.values()
                     for p in stage.layers[0].module.parameters())  # fmt: skip
        assert meta["parameters"] == parameter_bytes(ran, rank)
        assert meta["gradients"] == meta["optimizer_state"] == meta["parameters"] - frozen
