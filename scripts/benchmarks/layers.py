"""A job's layers, batch, loss and optimizer for the sides that are not the engine.

They come from the same targets, layers after the same seeding, so all sides hold the same weights and do the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from engine.job import Job
from engine.pipeline.seeds import building
from engine.targets import build
from engine.training.build import model_layers
from engine.training.samples.source import dataset, pair
from models.sleep import Sleeper, late


def stage_of(job: Job, stage: int) -> nn.Sequential:
    """The layers of one stage, as the engine cuts the model."""
    ends = [*job.split[1:], len(job.layers)]
    return _built(job, job.split[stage], ends[stage])


class HalvedSleeper(nn.Module):
    """A sleeping layer for a library that cuts the graph itself: the weight's share of the time lies on its weight."""

    def __init__(self, sleeper: Sleeper) -> None:
        super().__init__()
        self.sleeper = sleeper

    def forward(self, x: Tensor) -> Tensor:
        layer = self.sleeper
        flat = x.flatten(1)
        fitted = nn.functional.pad(flat, (0, layer.linear.in_features - flat.shape[1]))
        weight = late(layer.linear.weight, 0.0, layer.weight_s, 0.0)
        y = nn.functional.linear(fitted, weight, layer.linear.bias)
        return late(y, layer.forward_s, layer.input_s, 0.0).clone()  # the library detaches it in place: no view


def halved(stage: nn.Sequential) -> nn.Sequential:
    """The stage with its sleeping layers made for a split backward; others are as they were."""
    return nn.Sequential(*(HalvedSleeper(layer) if isinstance(layer, Sleeper) else layer for layer in stage))


def whole(job: Job) -> nn.Sequential:
    return _built(job, 0, len(job.layers))


def _built(job: Job, begin: int, end: int) -> nn.Sequential:
    modules = []
    for index in range(begin, end):
        with building(job.settings.seed, index):
            modules.append(model_layers(job.settings.model)[index][1]())
    return nn.Sequential(*modules)


def batch_of(job: Job) -> tuple[Any, Any]:
    """(inputs, targets): the first global batch of the job's data set. The other sides load nothing inside a step."""
    data: Any = dataset(job.settings.data, evaluation=False)
    return pair(default_collate([data[i] for i in range(job.settings.train.global_batch_size)]))


def mean_loss(job: Job) -> Callable[[Any, Any], Tensor]:
    """The job's loss as a mean, as a plain training loop has it."""
    criterion = build(job.settings.model["loss"], where="model.loss")

    def loss(output: Any, target: Any) -> Tensor:
        value = criterion(output, target)
        return value[0] / value[1] if isinstance(value, tuple) else value

    return loss


def optimizer_of(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = build(job.settings.optimizer, list(module.parameters()), where="optimizer")
    return optimizer
