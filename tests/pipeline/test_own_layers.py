"""A model of one's own on a configuration that was another's: its split, and layers that convert themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from harness import run_threads, settings
from torch import Tensor, nn

from engine.pipeline.inspection.fake_model import FakeModel
from engine.prepare.prepare import prepare


class Tied(nn.Module):
    """One weight in two places, converted one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.first.double()
        self.second.double()
        assert self.second.weight is self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "double": lambda: nn.Linear(8, 8).double(),
    "half": lambda: nn.Linear(8, 8).half(),
    "to": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("cpu", torch.bfloat16),
    "twice": lambda: nn.Linear(8, 8).double().float(),
    "frozen": lambda: nn.Linear(8, 8).double().requires_grad_(False),
    "tied": Tied,
    "recurrent": lambda: nn.LSTM(8, 8, batch_first=True).double(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_convert_themselves_are_taken_whatever_ran_before(name: str, dtype: torch.dtype) -> None:
    whole = nn.Module._apply
    for _ in range(3):
        (module,) = FakeModel(lambda: [(name, LAYERS[name])], torch.device("cpu"), dtype).modules
        assert {p.dtype for p in module.parameters()} == {dtype}
        assert all(p.requires_grad != (name == "frozen") for p in module.parameters())
        assert len(list(module.parameters())) == len(list(LAYERS[name]().parameters()))  # what is tied stays so
        assert {b.dtype for b in module.buffers()} <= {dtype, torch.bool, torch.int64}
    assert nn.Module._apply is whole


def converted() -> list[tuple[str, Callable[[], nn.Module]]]:
    return [("a", LAYERS["double"]), ("b", LAYERS["half"]), ("c", Tied), ("d", lambda: nn.Linear(8, 5).double())]


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_they_train_in_the_precision_of_the_run(precision: str) -> None:
    asked = settings(
        "1f1b", 2, 2,
        precision=precision,
        model={"_target_": "test_own_layers.converted", "loss": {"_target_": "toys.TokenLoss"}},
    )  # fmt: skip
    ran = run_threads(asked)
    dtypes = {value.dtype for value in ran.state().values() if value.is_floating_point()}
    assert dtypes == {torch.float64 if precision == "fp64" else torch.float32}
    assert all(loss == loss for loss in ran.losses())


def test_a_split_of_another_model_is_refused_with_the_remedy() -> None:
    asked = settings(partition={"name": "model"})
    other = replace(asked, model=asked.model | {"split": ["layer3"]})
    with pytest.raises(ValueError, match=r"model\.split=\['layer3'\] does not fit .* set model\.split=null, or choose"):
        prepare(other, ".", ".")
    prepare(replace(other, model=asked.model | {"split": None}), ".", ".")
    prepare(replace(other, partition={"name": "parameters"}), ".", ".")
    prepare(replace(other, model=asked.model | {"split": ["block2"]}), ".", ".")
