"""What the parent tries once: everything impossible is refused before a worker starts, by what is wrong with it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from harness import run_threads, settings

from engine.errors import Interrupted, refusing
from engine.job import Job
from engine.prepare.prepare import prepare
from engine.settings import Train

LOSS = {"_target_": "torch.nn.CrossEntropyLoss"}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


def wanted(**changes: Any) -> Any:
    """Two linear layers on items that fit."""
    model = {"_target_": "odd.linear", "loss": LOSS} | changes.pop("model", {})
    data = {"_target_": "odd.Items"} | changes.pop("data", {})
    return settings("gpipe", 2, 4, **({"precision": "fp32", "model": model, "data": data, "optimizer": SGD} | changes))


def prepared(**changes: Any) -> Job:
    return prepare(wanted(**changes), ".", ".")


def refusal(**changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        prepared(**changes)
    return str(caught.value)


def test_what_fits_is_taken() -> None:
    assert prepared().train_samples == 32


DATA = {
    "text": ({"given": "text"}, ["item 0 of data has an input without a tensor", "'hello'"]),
    "none": ({"given": "nothing"}, ["inputs of items 0 and 31 of data", "NoneType"]),
    "object": ({"given": "object"}, ["inputs of items 0 and 31 of data", "object"]),
    "growing": ({"given": "growing"}, ["inputs of items 0 and 31 of data", "[8]", "[39]"]),
    "integers into a product": ({"given": "whole"}, ["layer '0'", "[4, 8] int64", "different dtypes"]),
    "targets of None": ({"target": "nothing"}, ["targets of items 0 and 31 of data", "NoneType"]),
    "targets of text": ({"target": "text"}, ["model.loss fails", "hello"]),
    "targets of numbers": ({"target": "number"}, ["model.loss fails", "targets ([4] float32)"]),
    "targets out of range": ({"target": "too large"}, ["model.loss fails", "Target 5 is out of bounds"]),
    "longer than it is": ({"length": 40}, ["item 39 of data cannot be used: IndexError: there is no item 39"]),
    "no length": ({"length": "long"}, ["data gives a data set whose length cannot be told: TypeError"]),
    "below nothing": ({"length": -1}, ["whose length cannot be told: ValueError"]),
    "held-out": ({"evaluation": {"given": "text"}}, ["item 0 of data.evaluation has an input without a tensor"]),
}


@pytest.mark.parametrize("what", DATA)
def test_data_that_cannot_be_used(what: str) -> None:
    data, parts = DATA[what]
    said = refusal(data=data)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("odd.a_list", "item 0 of data cannot be used: ValueError: a data set's item must be a pair"),
        ("odd.a_dict", "item 0 of data cannot be used: KeyError: 0"),
        ("odd.Stream", "data gives a Stream; a map-style data set is needed"),
        ("builtins.object", "data gives an object; a map-style data set is needed"),
    ],
)
def test_what_is_no_data_set(data: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prepare(settings(model={"_target_": "odd.linear", "loss": LOSS}, data={"_target_": data}), ".", ".")


@pytest.mark.parametrize(
    ("model", "given", "parts"),
    [
        ("odd.convolution", "row", ["layer '0'", "[4, 1, 8] uint8", "should be the same"]),
        ("odd.embedding", "vector", ["layer '0'", "[4, 8] float32", "Long, Int"]),
    ],
)
def test_inputs_of_a_dtype_that_a_layer_does_not_take(
    model: str, given: str, parts: list[str], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """And torch does not log, at length, what is refused in a line."""
    caplog.set_level(logging.ERROR, logger="torch._subclasses.fake_tensor")
    said = refusal(model={"_target_": model}, data={"given": given})
    assert all(part in said for part in parts), said
    assert not caplog.records and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("odd.detached", "no gradient flows"),
        ("odd.accuracy", "no gradient flows"),
        ("odd.many", "odd.many counts 'many'; a count is a number"),
        ("odd.nothing", "odd.nothing returned NoneType; it must return"),
        ("odd.quits", "model.loss fails on the model's output .*: SystemExit: 3"),
    ],
)
def test_losses_that_return_odd_things(loss: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prepared(model={"loss": {"_target_": loss}})


def test_a_loss_that_looks_at_values_is_no_odd_one() -> None:
    ran = run_threads(wanted(model={"loss": {"_target_": "odd.probabilities"}}))
    assert len(ran.losses()) == 3


@pytest.mark.parametrize("where", ["target", "init", "forward"])
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("exit", "SystemExit: 3"),
        ("keyboard", "KeyboardInterrupt: (no message)"),
        ("mute", "Mute: (no message: its __str__"),
    ],
)
def test_whatever_a_model_raises_is_named(where: str, what: str, said: str) -> None:
    found = refusal(model={"_target_": "odd.leaving", "where": where, "what": what})
    assert said in found and ("layer 'leaves'" in found or where == "target"), found


def test_what_a_signal_raises_is_not_the_models() -> None:
    with pytest.raises(Interrupted), refusing(str):
        raise Interrupted(15)


OPTIMIZERS = {
    "torch.optim.LBFGS": ["optimizer._target_=torch.optim.LBFGS", "its step() needs closure"],
    "torch.optim.SparseAdam": ["SparseAdam fails in its first step", "dense gradients"],
    "odd.no_optimizer": ["odd.no_optimizer gives an int", "no torch.optim.Optimizer"],
    "odd.Picky": ["matrices only", "odd.Picky"],
    "builtins.print": ["gives None"],
}


@pytest.mark.parametrize("target", OPTIMIZERS)
def test_optimizers_that_cannot_be_used(target: str) -> None:
    said = refusal(optimizer={"_target_": target})
    assert all(part in said for part in OPTIMIZERS[target]), said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", "abc"),
        ("lr", float("inf")),
        ("lr", float("nan")),
        ("momentum", float("nan")),
        ("weight_decay", float("nan")),
    ],
)
def test_options_that_are_no_numbers(name: str, value: Any) -> None:
    said = refusal(optimizer={"_target_": "torch.optim.SGD", "lr": 0.1} | {name: value})
    assert f"optimizer.{name}={value} must be" in said and "number" in said


def test_an_optimizer_sees_the_dimensions_of_the_models_parameters() -> None:
    """A model of matrices alone suits an optimizer for matrices."""
    model = {"_target_": "torch.nn.Sequential", "_args_": [_matrix(8), _matrix(5)]}
    assert prepared(model=model, optimizer={"_target_": "odd.Picky"}).layers[0].parameters == 64


def _matrix(outputs: int) -> dict[str, Any]:
    return {"_target_": "torch.nn.Linear", "in_features": 8, "out_features": outputs, "bias": False}


RATES = "torch.optim.lr_scheduler"
SCHEDULERS = {
    f"{RATES}.ReduceLROnPlateau": ({}, ["its step() needs metrics"]),
    f"{RATES}.OneCycleLR": ({"max_lr": 0.1, "total_steps": 2}, ["total_steps=2 fails in step 3 of the run"]),
    "odd.NoScheduler": ({}, ["gives a NoScheduler", "no step()"]),
    "odd.NeedsMetric": ({}, ["its step() needs loss"]),
    "builtins.print": ({}, ["gives None", "no step()"]),
}


@pytest.mark.parametrize("target", SCHEDULERS)
def test_schedulers_that_cannot_be_used(target: str) -> None:
    keywords, parts = SCHEDULERS[target]
    said = refusal(lr_scheduler={"_target_": target, **keywords})
    assert all(part in said for part in parts), said


def test_a_scheduler_is_tried_for_as_many_steps_as_there_are() -> None:
    rates = {"_target_": f"{RATES}.OneCycleLR", "max_lr": 0.1, "total_steps": 3}
    assert prepared(lr_scheduler=rates)
    said = refusal(lr_scheduler=rates, train=Train(epochs=2, steps=None, global_batch_size=8), data={"length": 16})
    assert "fails in step 4 of the run" in said, said
