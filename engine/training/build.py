"""From configuration to what a pipeline is built of: layers, precision, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily

from engine.errors import a_type
from engine.job import Job
from engine.pipeline.layers import children_of, is_cut, parts_of, without_data
from engine.settings import Settings
from engine.targets import build

_ENGINE_KEYS = ("loss", "loss_additive", "split", "overlap")  # of `model`: not for its function
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def model_layers(
    config: Mapping[str, Any],
    example: str = "",
    split: Sequence[str] = (),
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> list[tuple[str, Callable[[], nn.Module]]]:
    """The ordered layers that `model._target_` describes: (dotted name, factory).

    An `nn.Sequential` is taken apart into its children, where running these one after another is all that it does. Any
    other module is cut for inputs like the one of `example` (see `layers_of`). ValueError for anything else.
    """
    keywords = {key: value for key, value in config.items() if key not in _ENGINE_KEYS}
    made = _built(keywords)
    where = f"model._target_ {config.get('_target_')} returned"
    if isinstance(made, nn.Module):
        if isinstance(made, nn.Sequential) and not (example and is_cut(made)):
            children = children_of(made, where, "return")
        else:
            opened = [*(config.get("split") or ()), *split]
            children = parts_of(made, example, opened, device, dtype)
        return [(name, lambda child=child: child) for name, child in children]  # type: ignore[misc]
    layers = list(made) if isinstance(made, list | tuple) else []
    if made == []:
        raise ValueError(f"{where} an empty list: a model has layers")
    if not layers or not all(isinstance(x, tuple) and len(x) == 2 and callable(x[1]) for x in layers):
        raise ValueError(
            f"{where} {a_type(made)}; "
            "it must return a module, or a list of (dotted name, function that builds the layer)"
        )
    return layers


def _built(keywords: Mapping[str, Any]) -> Any:
    """What the model's function gives. A module whose maker looks at values is made for real, and copied without them.

    Many do, for numbers only: `[x.item() for x in torch.linspace(0, rate, layers)]`.
    """
    try:
        return build(keywords, where="model")
    except ValueError as error:
        if not isinstance(error.__cause__, DataDependentOutputException):
            raise
        with unset_fake_temporarily():
            made = build(keywords, where="model")
        if not isinstance(made, nn.Module):
            raise
        return without_data(made)


def autocast_of(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context of every forward under the run's precision."""
    if precision == "bf16":
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return nullcontext


def optimizer_of(settings: Settings) -> Callable[[list[nn.Parameter]], Any]:
    """Makes the configured optimizer from parameters."""
    return lambda parameters: build(settings.optimizer, parameters, where="optimizer")


def scheduler_of(settings: Settings) -> Callable[[Any], Any] | None:
    """Makes the configured learning-rate scheduler from an optimizer; None where there is none."""
    config = settings.lr_scheduler
    if not (config and config.get("_target_")):
        return None
    return lambda optimizer: build(config, optimizer, where="lr_scheduler")


def build_optimizer(job: Job, parameters: list[nn.Parameter]) -> tuple[Any, Any]:
    """(optimizer, scheduler or None) over a rank's parameters; (None, None) where it has none."""
    if not parameters:
        return None, None
    optimizer, schedule = optimizer_of(job.settings)(parameters), scheduler_of(job.settings)
    return optimizer, schedule(optimizer) if schedule else None
