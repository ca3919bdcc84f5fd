"""What a rank keeps in memory from step to step, in bytes, counted once: in its first update.

    before the update    gradients: what the step's backwards have left
    after it             parameters, the buckets that gradients are reduced in, the optimizer's state

Storages are counted, each once, so what shares memory is not counted twice. What a micro-batch leaves for its backward
is counted by `activations`; scratch memory of kernels and of transports is not counted anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from engine.gradients.buckets import Reducer
from engine.gradients.servers.pushes import PushReducer
from engine.pipeline.stage.activations import storage_bytes
from engine.pipeline.stage.stage import Stage
from engine.pipeline.updates.norms import Update


class StaticMemory:
    """Bytes of parameters, gradients, buckets and optimizer state of one rank.

    `divided`: the optimizer's work is. Each rank is then handed the gradients of its own part only, but its backwards
    have made them all.
    """

    def __init__(
        self, stages: Iterable[Stage], reducers: Iterable[Reducer], updates: Iterable[Update], divided: bool
    ) -> None:
        self._layers = [layer.module for stage in stages for layer in stage.layers]
        self._reducers, self._updates, self._divided = list(reducers), list(updates), divided
        self._gradients = 0

    def before_update(self) -> None:
        """Count the gradients; call when they are complete."""
        own = [p for module in self._layers for p in module.parameters()]
        if self._divided:
            self._gradients = sum(p.nbytes for p in own if p.requires_grad)
        else:
            self._gradients = sum(p.grad.nbytes for p in own if p.grad is not None)

    def after_update(self) -> dict[str, int]:
        """The meta of a `memory` record, in bytes: see `engine.telemetry.records`."""
        kept = (t for module in self._layers for tensors in (module.parameters(), module.buffers()) for t in tensors)
        state = [update.optimizer.state for update in self._updates if update.optimizer]
        served = sum(r.server.nbytes for r in self._reducers if isinstance(r, PushReducer) and r.server)
        return {
            "parameters": storage_bytes(kept) + served,
            "gradients": self._gradients,
            "buckets": sum(reducer.wire_bytes for reducer in self._reducers),
            "optimizer_state": storage_bytes(_tensors(state)),
        }


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
