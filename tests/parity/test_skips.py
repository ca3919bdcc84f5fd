"""Links that jump over stages: what passes between layers may hold more than the next one needs (C003, C063)."""

from __future__ import annotations

from typing import Any

import command
import pytest
import torch
from command import Engine
from harness import ADAM, close, equal, plain, run_threads, settings
from torch import Tensor, nn
from toys import Layers

from engine.cli import run

engine = command.engine  # a fixture
Passed = tuple[Tensor, tuple[Tensor, ...]]  # the value, and what later layers will want of earlier ones


class Down(nn.Module):
    """Leaves its input for the layer that mirrors it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given: Tensor | Passed) -> Passed:
        x, kept = given if isinstance(given, tuple) else (given, ())
        return self.linear(x).tanh(), (*kept, x)


class Up(nn.Module):
    """Takes the newest of what was left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, width)

    def forward(self, given: Passed) -> Passed:
        x, kept = given
        return self.linear(torch.cat([x, kept[-1]], dim=-1)).tanh(), kept[:-1]


class Head(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, given: Passed) -> Tensor:
        return self.linear(given[0])


def unet(depth: int = 4, width: int = 8, classes: int = 5) -> Layers:
    """As many layers down as up: with three ranks the first one's inputs are wanted on the last."""
    down: Layers = [(f"down{i}", lambda: Down(width)) for i in range(depth)]
    up: Layers = [(f"up{i}", lambda: Up(width)) for i in range(depth)]
    return [*down, *up, ("head", lambda: Head(width, classes))]


UNET = {"_target_": "test_skips.unet", "loss": {"_target_": "toys.TokenLoss"}}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.slow(keep=1)
def test_a_link_over_a_stage_trains_as_in_one_process(schedule: str, replicas: int) -> None:
    wanted: dict[str, Any] = {"model": UNET, "optimizer": ADAM, "clip_norm": 0.05, "global_batch_size": 10}
    given = settings(schedule, 3, 4, replicas, **wanted)
    state, losses = plain(given, microbatched=True)
    ran = run_threads(given)
    close(ran.state(), state)
    assert ran.losses() == pytest.approx(losses, rel=1e-12)
    assert replicas > 1 or equal(ran.state(), state)


@pytest.mark.parametrize("name", ["layer2.0.conv2", "layer2.0.bn3", "layer3.1.conv1"])
@pytest.mark.slow
def test_a_cut_inside_a_residual_block_is_refused(name: str, engine: Engine) -> None:
    """A block is one layer: a name inside of it is none, and nothing is rewritten to make it one."""
    said = engine("launch=threads", "device=cpu", "partition=manual", f"partition.split=[{name}]")
    assert said.code == run.REFUSED
    assert f"'{name}'" in said.err and "layer2.0" in said.err, said.err
    assert "Traceback" not in said.err
