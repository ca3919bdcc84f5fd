"""One process that trains as PipeDream does: the same delayed updates, written down without an engine."""

from __future__ import annotations

from typing import Any

import torch
from harness import cut_in
from torch import Tensor, nn

from engine.pipeline.losses import make_loss
from engine.pipeline.seeds import building, seed_for
from engine.prepare.prepare import prepare
from engine.settings import Settings
from engine.training.build import DTYPES, build_optimizer, model_layers
from engine.training.samples.batches import Batches
from engine.training.samples.source import dataset


def version_read(schedule: dict[str, Any], ranks: int, stage: int, update: int) -> int:
    """Which weights the micro-batches of an update read, both counted from the last drain: the papers' definitions."""
    if schedule["name"] == "pipedream_2bw":
        return max(update - 1, 0)
    behind = ranks - 1 if schedule.get("vertical_sync") else ranks - 1 - stage
    return max(update - behind, 0)


class _Stage:
    """A stage's layers and optimizer, and its weights after each update since the last drain."""

    def __init__(self, job: Any, layers: list[tuple[int, nn.Module]]) -> None:
        self.layers = layers
        self.parameters = [p for _, layer in layers for p in layer.parameters()]
        self.optimizer, self.scheduler = build_optimizer(job, self.parameters)
        self.history = [self.values()]

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def read(self, version: int) -> None:
        for parameter, value in zip(self.parameters, self.history[version], strict=True):
            parameter.copy_(value)

    def update(self) -> None:
        self.read(-1)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        self.history.append(self.values())


def delayed(wanted: Settings) -> tuple[dict[str, Tensor], list[float]]:
    """Final state, and the loss of each update. R may be more than 1: a gradient is the sum over the replicas'."""
    job, dtype = prepare(wanted, ".", "."), DTYPES[wanted.precision]
    with building(wanted.seed, "model"):
        factories, modules = model_layers(wanted.model), []
    for number, (_, factory) in enumerate(factories):
        with building(wanted.seed, number):
            modules.append(factory().to(dtype))
    numbered, ends = list(enumerate(modules)), [*job.split[1:], len(modules)]
    stages = [_Stage(job, numbered[a:b]) for a, b in zip(job.split, ends, strict=True)]
    loss, data = make_loss(wanted.model["loss"]), dataset(wanted.data, evaluation=False)
    batches = Batches(job.train_samples, wanted.train.global_batch_size, 1, wanted.seed, True)
    logged: list[float] = []
    shares = batches.shares(0, sum(job.windows))
    for length in job.windows:
        for stage in stages:
            stage.history = [stage.values()]
        for update in range(length):
            indices = next(shares)
            x = torch.stack([data[i][0] for i in indices]).to(dtype)
            y = torch.stack([data[i][1] for i in indices])
            total, sums = loss.count(y, None), []
            for number, stage in enumerate(stages):
                stage.read(version_read(wanted.schedule, len(stages), number, update))
            for replica, microbatch, start, rows in cut_in(wanted, len(indices), job.microbatches):
                value = x[start : start + rows].clone()
                for index, layer in enumerate(modules):
                    if job.layers[index].random:
                        torch.manual_seed(seed_for(wanted.seed, "draw", index, len(logged), microbatch, replica))
                    value = layer(value)
                part = loss(value, y[start : start + rows])
                sums.append(float(part.detach()))
                (part / total).backward()
            for stage in stages:
                stage.update()
            logged.append(sum(sums) / total)
    names = [layer.name for layer in job.layers]
    state = {f"{n}.{k}": v for n, layer in zip(names, modules, strict=True) for k, v in layer.state_dict().items()}
    return state, logged
