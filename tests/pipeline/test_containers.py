"""A container is taken apart where running its children one after another is all that it does.

Where its forward does more it is cut by following that (`test_cut.py`); what it does besides its forward is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from harness import plain, run_threads, settings
from torch import nn

from engine.prepare.prepare import prepare


@pytest.fixture(autouse=True)
def _without_global_hooks() -> Iterator[None]:
    yield
    nn.modules.module._global_forward_hooks.clear()


@pytest.mark.parametrize("how", ["plain", "named"])
def test_a_container_of_its_children_alone_is_taken_apart(how: str) -> None:
    wanted = settings("gpipe", 2, 4, model=_model(how))
    assert [layer.name for layer in prepare(wanted, ".", ".").layers] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("instance", "a Sequential with a forward of its own"),
        ("train", "a Frozen with a train of its own"),
        ("forward", "a Sequential with hooks on it"),
        ("pre", "a Sequential with hooks on it"),
        ("backward", "a Sequential with hooks on it"),
        ("backward pre", "a Sequential with hooks on it"),
        ("global", "a Sequential with hooks that were registered for all modules"),
    ],
)
def test_a_container_that_does_more_is_refused_by_name(how: str, what: str) -> None:
    said = f"model._target_ peculiar.container returned {what}, which is lost .* return a list of .dotted name"
    with pytest.raises(ValueError, match=said.replace("(scale)", r"\(scale\)").replace("__", re.escape("__"))):
        prepare(settings("gpipe", 2, 4, model=_model(how)), ".", ".")


def _model(how: str) -> dict[str, object]:
    return {"_target_": "peculiar.container", "how": how, "loss": {"_target_": "toys.TokenLoss"}}


def test_containers_inside_layers_run_whole() -> None:
    model = {"_target_": "peculiar.nested", "loss": {"_target_": "toys.TokenLoss"}}
    wanted = settings("1f1b", 3, 4, model=model)
    state, losses = plain(wanted, microbatched=True)
    ran = run_threads(wanted)
    assert ran.losses() == losses
    assert all(torch.equal(ran.state()[name], value) for name, value in state.items())
