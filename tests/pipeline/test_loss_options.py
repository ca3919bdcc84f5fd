"""Losses of the configuration: weights in lists, outputs with time first, and whether a loss may be divided at all."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import Batches, build_optimizer, building, close, run_threads, settings
from peculiar import Bits, Spoken, ctc, turned
from torch import nn
from toys import Tokens, mlp4

from engine.cli.config import from_plain
from engine.prepare.prepare import prepare
from engine.settings import DataParallelSettings, PipelineSettings

WEIGHT = [0.5, 2.0, 1.0, 0.25, 4.0]


def wanted(loss: dict[str, Any], data: str = "toys.Tokens", to: str = "classes", *args: Any, **changes: Any) -> Any:
    model = {"_target_": "peculiar.turned", "to": to, "loss": loss} | changes.pop("model", {})
    return settings(*args, model=model, data={"_target_": data}, **changes)


def whole(run: Any, data: Any, mean: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One plain process that takes `mean` of each batch at once."""
    layers = []
    for index, (_, make) in enumerate(turned(run.model["to"], classes=run.model.get("classes", 5))):
        with building(run.seed, index):
            layers.append(make().double())
    optimizer, _ = build_optimizer(prepare(run, ".", "."), [p for layer in layers for p in layer.parameters()])
    logged = []
    for indices in Batches(64, run.train.global_batch_size, 1, run.seed, True).shares(0, 3):
        value, target = torch.utils.data.default_collate([data[i] for i in indices])
        for layer in layers:
            value = layer(value)
        loss = mean(value, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logged.append(float(loss.detach()))
    names = [name for name, _ in turned()]
    return {f"{n}.{k}": v for n, x in zip(names, layers, strict=True) for k, v in x.state_dict().items()}, logged


WEIGHTED = torch.tensor(WEIGHT, dtype=torch.float64)


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "replicas"), [("1f1b", 2, 4, 1), ("gpipe", 2, 3, 2), ("zb_h1", 3, 5, 1)]
)
@pytest.mark.parametrize("name", ["class", "function", "pos_weight"])
@pytest.mark.slow(keep=3)
def test_weights_in_a_list_are_torchs_own_over_the_whole_batch(
    name: str, schedule: str, ranks: int, microbatches: int, replicas: int
) -> None:
    """With smoothing and ignored targets, which micro-batches count unevenly."""
    loss: dict[str, Any] = {"weight": WEIGHT}
    if name == "pos_weight":
        loss |= {"_target_": "torch.nn.BCEWithLogitsLoss", "pos_weight": WEIGHT[::-1]}
        run = wanted(loss, "peculiar.Bits", "same")
        data, mean = Bits(), nn.BCEWithLogitsLoss(WEIGHTED, pos_weight=WEIGHTED.flip(0))
    else:
        target = "torch.nn.CrossEntropyLoss" if name == "class" else "torch.nn.functional.cross_entropy"
        run = wanted(loss | {"_target_": target, "label_smoothing": 0.1})
        data, mean = Tokens(), nn.CrossEntropyLoss(WEIGHTED, label_smoothing=0.1)
    run = replace(
        run,
        schedule={"name": schedule},
        pipeline=PipelineSettings(ranks, microbatches),
        data_parallel=DataParallelSettings(replicas),
    )
    expected, losses = whole(run, data, mean)
    ran = run_threads(run)
    assert ran.losses() == pytest.approx(losses, rel=1e-9)
    close(ran.state(), expected)


def test_a_tensor_in_the_configuration_of_any_loss() -> None:
    """A function of one's own, with a tensor built from a section."""
    loss = {"_target_": "peculiar.doubling", "scale": {"_target_": "torch.tensor", "_args_": [[0.5, 1.5]]}}
    same = run_threads(wanted({"_target_": "peculiar.regression"}, to="same"))
    assert run_threads(wanted(loss, to="same")).losses()[0] == pytest.approx(2 * same.losses()[0], rel=1e-9)


def test_weights_of_another_length_are_refused_for_that() -> None:
    with pytest.raises(ValueError, match=r"model.loss fails on .* dimension of length 3") as caught:
        prepare(wanted({"_target_": "torch.nn.CrossEntropyLoss", "weight": [0.5, 2.0, 1.0]}), ".", ".")
    assert "null" not in str(caught.value)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.slow(keep=2)
def test_outputs_with_time_first_train_as_torchs_mean(schedule: str) -> None:
    """Twelve frames, micro-batches of four samples: dimension 0 is not the batch."""
    run = wanted({"_target_": "peculiar.spelt"}, "peculiar.Spoken", "time", schedule, 2, 4, model={"classes": 6})
    expected, losses = whole(run, Spoken(), lambda output, target: ctc(output, target, "mean"))
    ran = run_threads(run)
    assert ran.losses() == pytest.approx(losses, rel=1e-9)
    close(ran.state(), expected)


# ---- losses of a whole batch -------------------------------------------------------------------------------------

DIVIDED: list[dict[str, Any]] = [
    {"microbatches": 4},
    {"microbatches": 1, "replicas": 2},
    {"microbatches": 1, "accumulate": 2},
]


def divided(loss: str, **changes: Any) -> Any:
    model = {"_target_": "toys.mlp4", "loss": {"_target_": f"peculiar.{loss}"}} | changes.pop("model", {})
    return settings("gpipe", 2, model=model, **changes)


@pytest.mark.parametrize("how", DIVIDED)
@pytest.mark.parametrize("loss", ["contrast", "standardized", "careless", "batched"])
@pytest.mark.slow(keep=9)
def test_a_loss_that_does_not_add_up_is_refused_where_the_batch_is_divided(loss: str, how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model.loss does not add up over samples \(8 at once give") as caught:
        prepare(divided(loss, **how), ".", ".")
    name, value = list(how.items())[-1]
    assert f"{name}={value} would make another loss of it" in str(caught.value)
    assert "model.loss_additive=false" in str(caught.value)


def coupled(loss: str, data: dict[str, Any] | None = None, precision: str = "fp32", **keywords: Any) -> Any:
    section = {"_target_": f"coupled.{loss}", **keywords}
    data = {"_target_": "coupled.Rows", **(data or {})}
    return settings(
        "gpipe", 2, microbatches=2, model={"_target_": "coupled.net", "loss": section}, data=data, precision=precision
    )


@pytest.mark.parametrize(
    ("loss", "data"),
    [
        ("ignoring", {"ignored": True}),
        ("balanced", {"ordered": True}),
        *((name, {}) for name in ("root", "centred", "spread", "even", "Dropped")),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_samples_that_are_coupled_by_little_are_seen(loss: str, data: dict[str, Any], precision: str) -> None:
    with pytest.raises(ValueError, match=r"model\.loss does not add up over samples"):
        prepare(coupled(loss, data, precision), ".", ".")


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize(
    ("loss", "data"), [("ignoring", {}), ("Moved", {}), ("Moved", {"ordered": True}), ("Own", {"ignored": True})]
)
def test_a_state_that_training_moves_and_means_over_all_samples_are_not_refused(
    loss: str, data: dict[str, Any], precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert prepare(coupled(loss, data, precision), ".", ".")
    assert "not tried" not in caplog.text or loss == "Own"


@pytest.mark.parametrize(
    ("loss", "why"),
    [("python_draws", "it gives another number each time"), ("torch_draws", "it draws random numbers")],
)
def test_a_loss_that_draws_is_said_not_to_have_been_tried(
    loss: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert prepare(coupled(loss), ".", ".")
    (line,) = [record.message for record in caplog.records if "not tried" in record.message]
    assert why in line


def test_weights_in_a_list_serve_a_class_that_inherits_torchs() -> None:
    wanted = coupled("Own", {"ignored": True}, "fp64", weight=[0.5, 2.0, 1.0, 0.25])
    assert prepare(wanted, ".", ".")
    with pytest.raises(ValueError, match=r"model.loss.weight=\['a', 'b'\] must be a list of numbers"):
        prepare(coupled("Own", weight=["a", "b"]), ".", ".")


@pytest.mark.parametrize("loss", ["contrast", "careless"])
def test_a_batch_that_is_not_divided_is_the_whole(loss: str) -> None:
    import peculiar

    run = divided(loss, microbatches=1)
    ran = run_threads(run)
    close(ran.state(), mlp_by_hand(run, getattr(peculiar, loss)))


def mlp_by_hand(run: Any, loss: Any) -> dict[str, torch.Tensor]:
    layers = []
    for index, (_, make) in enumerate(mlp4()):
        with building(run.seed, index):
            layers.append(make().double())
    optimizer, _ = build_optimizer(prepare(run, ".", "."), [p for layer in layers for p in layer.parameters()])
    data = Tokens()
    for indices in Batches(64, 16, 1, run.seed, True).shares(0, 3):
        value, target = torch.utils.data.default_collate([data[i] for i in indices])
        for layer in layers:
            value = layer(value)
        loss(value, target).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in mlp4()]
    return {f"{n}.{k}": v for n, x in zip(names, layers, strict=True) for k, v in x.state_dict().items()}


@pytest.mark.parametrize("loss", ["Careful", "regression", "Centred", "sampled"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.slow(keep=6)
def test_a_loss_that_adds_up_is_divided(loss: str, precision: str) -> None:
    """Means over what they say that they count, sums with counts, a state, numbers that are drawn."""
    assert prepare(divided(loss, microbatches=4, replicas=2, precision=precision), ".", ".")


@pytest.mark.parametrize("ignored", [-100, 3])
def test_ignored_targets_refuse_nothing(ignored: int) -> None:
    """Micro-batches that count nothing, and a loss that is told what to ignore."""
    model = {"loss": {"_target_": "models.gpt.NextTokenLoss", "ignore_index": ignored}}
    data = {"_target_": "toys.Tokens", "blank": 1} if ignored == -100 else {"_target_": "peculiar.Scored"}
    assert prepare(divided("", microbatches=4, model=model, data=data), ".", ".")


def test_insisting_trains_on_the_parts_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = divided("contrast", microbatches=4, model={"loss_additive": False})
    ran = run_threads(run)
    assert len(ran.losses()) == 3
    assert sum("does not add up over samples" in record.message for record in caplog.records) == 1
    caplog.clear()
    prepare(divided("regression", microbatches=4, model={"loss_additive": False}), ".", ".")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_insisting_is_true_or_false() -> None:
    model = {"_target_": "toys.mlp4", "loss_additive": "maybe"}
    with pytest.raises(ValueError, match=r"model.loss_additive=maybe is not true or false"):
        from_plain({"schedule": {"name": "gpipe"}, "partition": {"name": "model"}, "model": model})


@pytest.mark.parametrize("loss", ["torch.nn.CrossEntropyLoss", "coupled.picking"])
def test_outputs_besides_one_tensor(loss: str) -> None:
    """A loss of one's own takes any nesting, a number without a dimension too; torch's say that they take a tensor."""
    run = coupled("", data={}, precision="fp64")
    model = {"_target_": "coupled.several", "loss": {"_target_": loss}}
    run = replace(run, model=model)
    if loss.startswith("coupled"):
        assert prepare(run, ".", ".")
        return
    with pytest.raises(ValueError, match=r"CrossEntropyLoss takes one tensor as output, but is given a tuple"):
        prepare(run, ".", ".")
