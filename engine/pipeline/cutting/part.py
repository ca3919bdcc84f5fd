"""A layer of a cut module: a stretch of its forward, and the submodules and tensors that this reads."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.pipeline.cutting.recorder import Step, filled
from engine.pipeline.cutting.recording import Recording, key_of
from engine.pipeline.cutting.values import call_of, tensors_in


class Part(nn.Module):
    """Layer `number` of a cut module. Its parameters and buffers have the names that they have in the whole module.

    It is given the model's input, or what the part before it hands on: (key, tensors...). `signature` is that of the
    whole module's forward. Its own attributes leave names for submodules.
    """

    _whole_names = True  # what it holds is called as in the unsplit model, without the layer's name before it

    def __init__(self, number: int, last: bool, recording: Recording, signature: inspect.Signature | None) -> None:
        super().__init__()
        self._part_number, self._part_last, self._part_recording = number, last, recording
        self._part_signature = signature

    def forward(self, value: Any) -> Any:
        """Repeat this layer's steps; the last layer gives what the whole module would."""
        if self._part_number == 0:
            key = key_of(value, self.training)
            tensors: Sequence[Tensor] = tensors_in(call_of(self._part_signature, value))
        else:
            key, *tensors = value
        divided = self._part_recording.divided(key)
        stretch = divided.stretches[self._part_number]
        values = dict(zip(stretch.takes, tensors, strict=True))
        device = tensors[0].device if tensors else torch.device("cpu")
        for step in stretch.steps:
            with step.context(device.type):
                _repeat(step, self, values, device)
        if self._part_last:
            return filled(divided.output, values, partial(_tensor, self), device)
        return (key, *(values[number] for number in stretch.hands))


def _repeat(step: Step, part: Part, values: dict[int, Tensor], device: torch.device) -> None:
    own = partial(_tensor, part)
    args, kwargs = filled(step.args, values, own, device), filled(step.kwargs, values, own, device)
    if step.call is not None:  # what a __call__ of its own does around this is steps of its own
        result = nn.Module.__call__(part.get_submodule(step.call), *args, **kwargs)
    else:
        assert step.function is not None
        result = step.function(*args, **kwargs)
    if step.results:
        values.update(zip(step.results, tensors_in(result), strict=True))


def hold(part: Part, name: str, value: nn.Module | Tensor, persistent: bool | None = True) -> None:
    """Put a submodule or a tensor at its dotted name; what is there already stays.

    `persistent` is for buffers; None: a plain attribute.
    """
    at, _, own = name.rpartition(".")
    owner: nn.Module = part
    for step in at.split(".") if at else ():
        if step not in owner._modules:
            owner.add_module(step, nn.Module())
        owner = owner._modules[step]  # type: ignore[assignment]
    if own in owner._modules or own in owner._parameters or own in owner._buffers or own in vars(owner):
        return
    if isinstance(value, nn.Module):
        owner.add_module(own, value)
    elif isinstance(value, nn.Parameter):
        owner.register_parameter(own, value)
    elif persistent is None:
        setattr(owner, own, value)
    else:
        owner.register_buffer(own, value, persistent)


def _tensor(part: Part, name: str) -> Any:
    at, _, own = name.rpartition(".")
    return getattr(part.get_submodule(at), own)
