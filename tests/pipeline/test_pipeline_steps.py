"""`Pipeline.steps`: asynchronous schedules update without a drain between batches, as the engine's own run does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import toys
from harness import DTYPES, model_layers, run_threads, settings
from test_pipeline import batches, close, model
from torch import Tensor, nn

import engine
from engine.prepare.prepare import prepare
from engine.settings import Settings
from engine.training.samples.batches import Batches
from engine.training.samples.source import dataset

OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)  # as harness.SGD


def samples(wanted: Settings, replica: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches that a run takes."""
    data = dataset(wanted.data, evaluation=False)
    assert data is not None
    replicas, size = wanted.data_parallel.replicas, wanted.train.global_batch_size
    for indices in Batches(64, size, replicas, wanted.seed, True).shares(replica, steps):
        yield torch.stack([data[i][0] for i in indices]), torch.stack([data[i][1] for i in indices])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [("pipedream", {}), ("pipedream", {"vertical_sync": True}), ("pipedream_2bw", {}), ("1f1b", {}), ("zb_h1", {})],
)
@pytest.mark.slow(keep=4)
def test_equals_a_run_of_the_engine_bitwise(schedule: str, options: dict[str, Any], replicas: int) -> None:
    wanted = replace(settings("gpipe", 2, 4, replicas, steps=4), schedule={"name": schedule} | options)
    ran = run_threads(wanted)
    split = [prepare(wanted, ".", ".").layers[2].name]

    def loop() -> tuple[list[float], dict[str, Tensor]]:
        piped = engine.Pipeline(
            model_layers(wanted.model), toys.TokenLoss(), schedule=schedule, options=options, microbatches=4,
            replicas=replicas, split=split, optimizer=OPTIMIZER, dtype=DTYPES[wanted.precision],
        )  # fmt: skip
        losses = piped.steps(list(samples(wanted, piped.replica, 4)))
        return [float(loss) for loss in losses], piped.state_dict()

    for losses, state in engine.run_threads(2 * replicas, loop):
        assert losses == pytest.approx(ran.losses(), rel=1e-12)
        assert all(torch.equal(state[name], value) for name, value in ran.state().items())
        assert list(state) == list(ran.state())


def test_each_call_drains() -> None:
    """One batch at a time there is no other version of the weights: plain SGD, whatever the schedule."""
    data, net = batches([6, 6, 6]), model()
    optimizer, expected = OPTIMIZER(net.parameters()), []
    for x, y in data:
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))

    def loop() -> tuple[list[float], dict[str, Tensor]]:
        piped = engine.Pipeline(model(), nn.functional.cross_entropy, schedule="pipedream", optimizer=OPTIMIZER)
        return [float(piped.step(batch)) for batch in data], piped.state_dict()

    for losses, state in engine.run_threads(2, loop):
        assert losses == pytest.approx(expected, rel=1e-9)
        close(state, net.state_dict())


def test_batches_of_one_call_have_one_shape() -> None:
    def loop() -> None:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

        piped = engine.Pipeline(model(), loss, schedule="pipedream", optimizer=OPTIMIZER)
        with pytest.raises(ValueError, match="the batches of one call of steps"):
            piped.steps([*batches([6]), *batches([6], tokens=2)])
        assert piped.steps([]) == []

    engine.run_threads(2, loop)
