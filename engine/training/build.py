"""What one rank is made of: its device, its stages, its channels, its reducers, its optimizer.

Each rank builds only its own layers, each after seeding from (seed, layer). Channels and groups are opened by all
ranks in one order, which follows from the job alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from engine.collectives import Collective, Group
from engine.errors import a_type
from engine.gradients.shard_parameters import ShardParameter
from engine.job import Job
from engine.pipeline.dtypes import cast
from engine.pipeline.modes import begin_training
from engine.pipeline.seeds import building
from engine.pipeline.stage import Stage, StageLayer
from engine.targets import build
from engine.training.connections import connections
from engine.training.update import Norms, PieceNorms
from engine.transport import Transport

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_ENGINE_KEYS = ("loss", "loss_additive", "split", "overlap")  # of `model`: not for its function
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def model_layers(config: Mapping[str, Any]) -> list[tuple[str, Callable[[], nn.Module]]]:
    """The ordered layers that `model._target_` describes: (dotted name, factory).

    An `nn.Sequential` is taken apart into its children, where running these one after another is all that it does.
    ValueError for anything else.
    """
    keywords = {key: value for key, value in config.items() if key not in _ENGINE_KEYS}
    made = build(keywords, where="model")
    if isinstance(made, nn.Sequential):
        if more := _beyond_children(made):
            raise ValueError(
                f"model._target_ {config.get('_target_')} returned {a_type(made)} with {more}, which is lost "
                "where its children run on different ranks: return a list of (dotted name, function that builds the "
                "layer) instead, with that inside a layer"
            )
        if not len(made):
            raise ValueError(
                f"model._target_ {config.get('_target_')} returned {a_type(made)} without layers: add some"
            )
        # Not named_children(), which leaves out the second use of a module.
        return [(name, lambda child=child: child) for name, child in made._modules.items()]  # type: ignore[misc]
    layers = list(made) if isinstance(made, list | tuple) else []
    if made == []:
        raise ValueError(f"model._target_ {config.get('_target_')} returned an empty list: a model has layers")
    if not layers or not all(isinstance(x, tuple) and len(x) == 2 and callable(x[1]) for x in layers):
        raise ValueError(
            f"model._target_ {config.get('_target_')} returned {a_type(made)}; "
            "it must return an nn.Sequential or a list of (dotted name, function that builds the layer)"
        )
    return layers


def _beyond_children(made: nn.Sequential) -> str:
    """What a container does besides running its children one after another, in words; empty where nothing."""
    kind = type(made)
    for name, own in (
        *(("forward", nn.Sequential), ("__iter__", nn.Sequential)),
        *(("__call__", nn.Module), ("train", nn.Module), ("eval", nn.Module)),
    ):
        if name in vars(made) or getattr(kind, name) is not getattr(own, name):
            return f"a {name} of its own"
    if any(getattr(made, hooks) for hooks in _HOOKS):
        return "hooks on it"
    if torch.nn.modules.module._has_any_global_hook():
        return "hooks that were registered for all modules"
    if made._parameters or made._buffers:
        return f"tensors of its own ({', '.join([*made._parameters, *made._buffers])})"
    return ""


def autocast_of(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context of every forward under the run's precision."""
    if precision == "bf16":
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return nullcontext


def build_stages(job: Job, rank: int, device: torch.device) -> dict[int, Stage]:
    """The stages of pipeline rank `rank`, on `device`, in the run's parameter dtype."""
    settings = job.settings
    with building(settings.seed, "model"):
        factories = model_layers(settings.model)
    stages = {}
    ends = [*job.split[1:], len(job.layers)]
    for index in job.placement.stages_of(rank):
        layers = []
        for number in range(job.split[index], ends[index]):
            with building(settings.seed, number):
                module = factories[number][1]()
            cast(module, device, DTYPES[settings.precision])
            begin_training(module)
            layers.append(StageLayer(number, job.layers[number].name, module, job.layers[number].random))
        stage = Stage(index, layers, device, settings.seed, job.random_loss)
        stage.autocast = autocast_of(settings.precision, device)
        stages[index] = stage
    return stages


class Wiring:
    """Channels and groups of one rank. `sharing[s]`: all ranks that hold a copy of its stage s; `reduction[s]`: their
    all-reduce."""

    def __init__(self, job: Job, transport: Transport) -> None:
        self._transport = transport
        self._ranks = job.ranks
        me = transport.rank
        self.replica, self.rank = divmod(me, job.ranks)
        found = connections(job)
        transport.open(found.edges)
        for members, label, backend in found.groups:
            if len(members) > 1 and me in members:
                transport.open_group(members, label, backend)
        self._pipeline = [self.replica * job.ranks + r for r in range(job.ranks)]
        self._last = found.sharing[job.placement.stages - 1]
        self._everybody = list(range(job.world))
        self.reduction: dict[int, Collective] = {}
        self.sharing: dict[int, Group] = {}
        for s, members in found.sharing.items():
            if me in members:
                self.sharing[s] = Group(transport, members, f"reduce{s}", found.kinds[s], checked=False)
                self.reduction[s] = self.sharing[s].collective

    def sum_over_pipeline(self, vector: torch.Tensor) -> None:
        """Sum a vector over the ranks of this replica, in place; waits for them."""
        if self._ranks > 1:
            self._transport.all_reduce(vector, self._pipeline, "norms").wait()

    def sum_over_everybody(self, vector: torch.Tensor) -> None:
        """Sum a vector over all ranks of the run, in place; waits for them."""
        self._transport.all_reduce(vector, self._everybody, "norms").wait()

    def sum_counts(self, count: torch.Tensor) -> Callable[[], None]:
        """Start the sum of a count over all last ranks (others take no part); the result waits for it."""
        if len(self._last) == 1 or self._transport.rank not in self._last:
            return lambda: None
        return self._transport.all_reduce(count, self._last, "counts").wait


def norms_of(
    job: Job,
    stages: Mapping[int, Stage],
    pieces: Mapping[int, Sequence[ShardParameter]],
    wiring: Wiring,
    device: torch.device,
) -> Norms:
    """The norm of the whole model, seen from the rank that holds `stages`. It counts first copies only, or its own
    `pieces` of each stage where the optimizer is divided."""
    given = job.settings.train.clip_norm_type
    power, dtype = math.inf if given is None else given, DTYPES[job.settings.precision]
    before = [0]
    for layer in job.layers:
        before.append(before[-1] + layer.trainable)
    if pieces:
        own = [(before[job.split[s]] + number, p) for s, parts in sorted(pieces.items()) for number, p in parts]
        places, parameters = [place for place, _ in own], [p for _, p in own]
        rest = before[-1], wiring.sum_over_everybody, dtype, device, power
        return PieceNorms(parameters, places, *rest, member=wiring.replica * job.ranks + wiring.rank, members=job.world)
    ends, counted = [*job.split[1:], len(job.layers)], job.placement.first_copies(wiring.rank)
    places = [p for s in counted for p in range(before[job.split[s]], before[ends[s]])]
    parameters = [p for s in counted for _, p in stages[s].named_parameters()]
    return Norms(parameters, places, before[-1], wiring.sum_over_pipeline, dtype, device, power)


def build_optimizer(job: Job, parameters: list[nn.Parameter]) -> tuple[Any, Any]:
    """(optimizer, scheduler or None) over a rank's parameters; (None, None) where it has none."""
    if not parameters:
        return None, None
    optimizer = build(job.settings.optimizer, parameters, where="optimizer")
    config = job.settings.lr_scheduler
    scheduler = build(config, optimizer, where="lr_scheduler") if config and config.get("_target_") else None
    return optimizer, scheduler
