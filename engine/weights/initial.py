"""`init.weights`: what a model starts from instead of drawn weights. Each rank reads what its own stages need."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from engine.pipeline.stage.stage import Stage
from engine.pipeline.states import take
from engine.settings import Init
from engine.weights.names import Match, Shape, match, parse_prefixes, renamed, suggestion
from engine.weights.source import Source, open_weights

log = logging.getLogger(__name__)


class InitialWeights:
    """The file or folder that `init.weights` names, under the names that the model uses."""

    def __init__(self, init: Init, start_dir: str) -> None:
        assert init.weights is not None
        self._init, self.path = init, Path(start_dir, init.weights)
        self._source: Source = open_weights(self.path)
        self._names = renamed(self._source.shapes, parse_prefixes(init.prefix))

    def compare(self, model: Mapping[str, Shape]) -> Match:
        """Compare with the model's names and shapes; ValueError where they differ and `init.strict` is true."""
        found = match(model, {name: self._source.shapes[given] for name, given in self._names.items()})
        if found.whole or not (self._init.strict or not found.shared):
            return found
        rule = suggestion(model, self._names)
        hint = f"; init.prefix=[{rule}] would match more" if rule else ""
        remedy = "init.strict=false takes what matches" if found.shared else "give the weights of this model"
        raise ValueError(f"init.weights={self._init.weights} does not fit the model: {found}{hint}; {remedy}")

    def load(self, stages: Collection[Stage]) -> None:
        """Copy what there is for these stages into their parameters and buffers, in place."""
        own: dict[str, Tensor] = {}
        for stage in stages:
            own |= {name: value for name, value in stage.state_dict().items() if isinstance(value, Tensor)}
        wanted = {self._names[name]: name for name in own if name in self._names}
        read = ((wanted[given], tensor) for given, tensor in self._source.read(list(wanted)))
        take(stages, {name: tensor for name, tensor in read if tensor.shape == own[name].shape})


def shapes_of(state: Mapping[str, object]) -> dict[str, Shape]:
    """Name -> shape of the tensors of a state."""
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def check_weights(init: Init, start_dir: str, state: Mapping[str, object]) -> None:
    """Compare `init.weights` with a model's (fake) state before anything starts; log what is left out.

    ValueError where it cannot be read, or does not fit and `init.strict` is true.
    """
    if init.weights is None:
        return
    found = InitialWeights(init, start_dir).compare(shapes_of(state))
    if not found.whole:
        log.warning("init.weights=%s: %s; %d tensors are taken", init.weights, found, len(found.shared))
