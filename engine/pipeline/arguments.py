"""The arguments of `engine.Pipeline`: what each may be, and refusals that call them by their names.

The parts below a pipeline serve runs of a configuration too, and name its keys: `pipeline.ranks`. To somebody who has
called the class that key is `ranks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.errors import a_type

_KEYS = {
    "pipeline.ranks": "ranks",
    "pipeline.microbatches": "microbatches",
    "data_parallel.replicas": "replicas",
    "partition.split": "split",
    "partition=parameters": "split=None",
    "model.overlap": "overlap",
    "model.loss": "loss",
    "train.clip_norm": "clip_norm",
}
_KEY = re.compile("|".join(rf"\b{re.escape(key)}\b" for key in _KEYS) + r"|\bschedule\.(\w+)")


def in_arguments(text: str) -> str:
    """A message about a configuration as one about the arguments of `engine.Pipeline`."""
    return _KEY.sub(lambda found: _KEYS.get(found[0]) or f"options[{found[1]!r}]", text)


@contextmanager
def refusing_arguments() -> Iterator[None]:
    """Let a ValueError raised within name arguments instead of configuration keys."""
    try:
        yield
    except ValueError as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (in_arguments(error.args[0]),)
        raise


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_whole(least: int) -> Callable[[Any], bool]:
    return lambda value: _is_number(value, int) and value >= least


def _is_names(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


def _is_options(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, str | torch.device) and torch.device(value).type in ("cpu", "cuda")
    except RuntimeError:  # no name of a device at all
        return False


def _above_zero(value: Any) -> bool:
    return _is_number(value, int, float) and value > 0  # NaN is not


_MAKER = "a function of a list of parameters that makes one, for instance functools.partial(torch.optim.SGD, lr=0.1)"
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {  # None, too, where it is the default
    "schedule": (lambda value: isinstance(value, str), "the name of a schedule, such as 'gpipe' or '1f1b'"),
    "microbatches": (_is_whole(1), "a whole number, 1 or more"),
    "ranks": (_is_whole(1), "a whole number, 1 or more, or None for all ranks there are"),
    "replicas": (_is_whole(1), "a whole number, 1 or more"),
    "options": (_is_options, "a dictionary of the schedule's own options, such as {'chunks': 2}"),
    "split": (_is_names, "a list of names of layers, those that begin stages 1, 2, ..."),
    "optimizer": (callable, _MAKER),
    "lr_scheduler": (callable, "a function of the optimizer that makes one"),
    "clip_norm": (_above_zero, "a number above 0, or None for no clipping"),
    "clip_norm_type": (_above_zero, "a number above 0, such as 2.0 or float('inf'), or None for the largest element"),
    "bucket_bytes": (_is_whole(1), "a whole number of bytes, 1 or more"),
    "shard_optimizer": (lambda value: isinstance(value, bool), "True or False"),
    "device": (_is_device, "a CPU or CUDA device, such as 'cpu' or 'cuda:0', or None for where the ranks are"),
    "dtype": (
        lambda value: isinstance(value, torch.dtype) and value.is_floating_point,
        "a floating dtype such as torch.float64, or None for the layers' own",
    ),
    "autocast": (
        lambda value: (isinstance(value, torch.dtype) and value.is_floating_point) or callable(value),
        "a floating dtype such as torch.bfloat16, or a function that makes the context of a forward",
    ),
    "seed": (_is_whole(0), "a whole number, 0 or more"),
    "max_norm": (_above_zero, "a number above 0"),
    "norm_type": (_above_zero, "a number above 0, such as 2.0 or float('inf')"),
}
_OPTIONAL = {
    *("ranks", "options", "split", "optimizer", "lr_scheduler", "clip_norm", "clip_norm_type", "device"),
    *("dtype", "autocast"),
}


def check_values(**given: Any) -> None:
    """ValueError for the first argument whose value cannot be: it says which, the value, and what may be given."""
    for name, value in given.items():
        allowed, words = _ALLOWED[name]
        if not ((value is None and name in _OPTIONAL) or allowed(value)):
            plain = value is None or isinstance(value, bool | int | float | str | torch.device | torch.dtype)
            said = f"{name}={value!r}" if plain else f"{name} is {a_type(value)}; it"
            raise ValueError(f"{said} must be {words}")
