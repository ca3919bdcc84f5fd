"""Parts of a run that the parent tries once, small and for real, so that no worker has to find out.

    data set               its length, its first and its last item, and that these two make one batch
    loss                   on a stand-in for the output and a real target: what it returns, whether gradients flow,
                           and whether it is the same in two parts as it is whole
    optimizer, scheduler   over stand-ins for the model's parameters; the scheduler takes the steps of the run

What fails is refused with a ValueError that names the key and what is wrong with it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset, default_collate

from engine.errors import a_type, cause, refusing, said
from engine.job import MessageSpec, TensorSpec
from engine.pipeline.dtypes import to_device
from engine.pipeline.inspection.fake_model import OperatorLog
from engine.pipeline.losses import Loss, stand_in
from engine.pipeline.messages.boundary import shapes
from engine.pipeline.messages.nesting import template
from engine.settings import Settings
from engine.targets import blaming, build, required
from engine.training.samples.source import pair

MOST_TRIED = 1000  # steps of a scheduler: a moment, even with many parameter groups

Sample = tuple[Any, Any]

# ---- data set ----------------------------------------------------------------------------------------------------


def length_of(data: Any, where: str) -> int:
    """Samples of a map-style data set; `where` is the section that gave it."""
    mapped = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not mapped or isinstance(data, type | IterableDataset):
        what = f"the class {data.__name__} itself" if isinstance(data, type) else a_type(data)
        raise ValueError(f"{where} gives {what}; a map-style data set is needed (__len__, __getitem__)")
    with refusing(lambda error: f"{where} gives a data set whose length cannot be told: {said(error)}"):
        length = len(data)
    if length == 0:
        raise ValueError(f"{where} gives a data set without samples")
    return length


def sample_of(data: Any, where: str) -> Sample:
    """The first item, (input, target), as a batch of one and the last item beside it can be collated."""
    first, last = _item(data, 0, where), _item(data, len(data) - 1, where)
    for name, part, other in zip(("input", "target"), first, last, strict=True):
        with refusing(lambda error, name=name: _no_batch(name, where, len(data) - 1, error)):  # type: ignore[misc]
            default_collate([part, other])
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(default_collate([first[0]]))):
        raise ValueError(
            f"item 0 of {where} has an input without a tensor: {str(first[0])[:80]!r}; give tensors, arrays or numbers"
        )
    return first


def _item(data: Any, index: int, where: str) -> Sample:
    with refusing(lambda error: f"item {index} of {where} cannot be used: {said(error)}"):
        return pair(data[index])


def _no_batch(name: str, where: str, last: int, error: BaseException) -> str:
    return (
        f"the {name}s of items 0 and {last} of {where} cannot be put into one batch: {said(error)}. Inputs and targets "
        "are nestings of tensors, arrays and numbers, of the same shapes in every item"
    )


# ---- loss --------------------------------------------------------------------------------------------------------


def try_loss(
    loss: Loss,
    output: MessageSpec,
    target: Any,
    rows: int,
    dtype: torch.dtype,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> bool:
    """Call the loss as the last stage of a CPU will; whether it drew random numbers.

    It gets a stand-in for `output`, which is that of `rows` samples, and a batch of as many `target`s.
    """
    given, loss = _as_output(output), loss.apart()
    with refusing(lambda error: f"model.loss fails on an output of {shapes(given)}: {said(error)}"):
        expected = to_device(default_collate([target] * rows), torch.device("cpu"), dtype)
    complaint = f"model.loss fails on the model's output ({shapes(given)}) and the data's targets ({shapes(expected)})"
    with refusing(lambda error: f"{complaint}: {cause(error)}"), autocast(), OperatorLog() as watch:
        total = loss(given, expected)
        count = loss.count(expected, output)
        loss.scored(given, expected)
    wanting = any(leaf.requires_grad for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
    if wanting and count and not total.requires_grad:
        raise ValueError(
            "model.loss returns a number through which no gradient flows to the model's output: it must be computed "
            "from the output by differentiable operations (no argmax, item() or detach())"
        )
    return watch.drawn


def _as_output(output: MessageSpec) -> Any:
    """A stand-in that requires grad where the output does. Not a leaf: a loss may work in place."""
    wanting = pytree.tree_map(lambda leaf: isinstance(leaf, TensorSpec) and leaf.requires_grad, template(output))
    made = stand_in(output, torch.device("cpu"))
    return pytree.tree_map(lambda leaf, wants: leaf.requires_grad_().clone() if wants else leaf, made, wanting)


# ---- optimizer and scheduler -------------------------------------------------------------------------------------


def try_update(settings: Settings, parameters: Sequence[Tensor], steps: int) -> None:
    """Build optimizer and scheduler as a worker does, and let them step.

    Stand-ins have the dimensions of the model's trainable parameters, each of size 1: what an optimizer has against a
    parameter is seldom its size, and these take no memory. On a GPU the optimizer's step is not tried: options may
    need parameters that lie there.
    """
    stand_ins = [nn.Parameter(torch.zeros([1] * p.ndim, dtype=p.dtype)) for p in parameters]
    stand_ins = stand_ins or [nn.Parameter(torch.zeros(1))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the workers will say it
        optimizer = _optimizer(settings.optimizer, stand_ins, stepping=settings.device == "cpu")
        config = settings.lr_scheduler
        if config and config.get("_target_"):
            _try_scheduler(config, optimizer, min(steps, MOST_TRIED))


def _optimizer(config: Mapping[str, Any], parameters: list[nn.Parameter], stepping: bool) -> Optimizer:
    _check_numbers(config)
    made = build(config, parameters, where="optimizer")
    label = f"optimizer._target_={config['_target_']}"
    if not isinstance(made, Optimizer):
        raise ValueError(f"{label} gives {a_type(made)}, which is no torch.optim.Optimizer")
    if needed := ", ".join(required(made.step)):
        raise ValueError(
            f"{label} cannot be used: its step() needs {needed} (the loss, computed again and again), which a pipeline "
            "does not give; take an optimizer that steps by the gradients alone, like torch.optim.SGD or Adam"
        )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if stepping:
        complaint = f"{label}{_keywords(config)} fails in its first step"
        with blaming(config, "optimizer"), refusing(lambda error: f"{complaint}: {said(error)}"):
            made.step()
    return made


def _check_numbers(config: Mapping[str, Any]) -> None:
    """What torch's optimizers take without a word, or refuse in words about operators."""
    rate = config.get("lr", 0.0)
    if isinstance(rate, str) or rate in (math.inf, -math.inf):
        raise ValueError(f"optimizer.lr={rate} must be a finite number, like 0.1 or 1e-3")
    for key, value in config.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"optimizer.{key}={value} must be a number")


def _try_scheduler(config: Mapping[str, Any], optimizer: Optimizer, steps: int) -> None:
    made = build(config, optimizer, where="lr_scheduler")
    label = f"lr_scheduler._target_={config['_target_']}"
    if not callable(getattr(made, "step", None)):
        raise ValueError(f"{label} gives {a_type(made)}, which is no scheduler: it has no step()")
    if needed := ", ".join(required(made.step)):
        raise ValueError(
            f"{label} cannot be used: its step() needs {needed}, but the engine takes one step of the schedule after "
            "each optimizer step, with no figure given; take a scheduler that counts steps"
        )
    for step in range(1, steps + 1):
        complaint = f"{label}{_keywords(config)} fails in step {step} of the run"
        with blaming(config, "lr_scheduler"), refusing(lambda error: f"{complaint}: {said(error)}"):  # noqa: B023
            made.step()


def _keywords(config: Mapping[str, Any]) -> str:
    given = ", ".join(f"{key}={value}" for key, value in config.items() if key != "_target_")
    return f" with {given}" if given else ""
