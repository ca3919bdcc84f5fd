"""Several versions of a stage's weights at once: what an asynchronous schedule reads while it already updates.

    module parameters ═ newest version        the optimizer's; evaluation and state dicts see these
    version v         ═ leaf tensors          a forward and its backward run on these, by torch.func.functional_call
    gradient of v     ─► .grad of the module's parameters, right after the backward: reduced and applied as ever

An update never changes a tensor that a backward still needs. The leaves of the newest version share the parameters'
memory; before an update that some micro-batch in flight must not see, the parameters move to a copy and leave the old
memory to the leaves. Where none must not see it (on the last stage of PipeDream) the update is done in place. So the
number of versions in memory is exactly the number that is read, and the newest.

The whole backward too runs with the version's leaves in place of the parameters: a layer that is recomputed then
(torch.utils.checkpoint) reads the weights of its forward. With the swap around the forward alone it would silently
read the newest ones. Buffers have no versions: running statistics follow the forwards, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call

from engine.telemetry.records import VERSION_COLUMNS


class _Holder(nn.Module):
    """Layers, and whatever is to be run while their parameters are others."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class Versions:
    """The versions of the weights of stage `index`. Versions are numbered by the optimizer steps before them."""

    def __init__(self, index: int, layers: Sequence[nn.Module]) -> None:
        self._index = index
        self._holder = _Holder(layers)
        named = self._holder.named_parameters(remove_duplicate=False)
        self._own = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._leaves: dict[int, dict[str, nn.Parameter]] = {}
        self._reads: list[int] = []
        self._left: dict[int, int] = {}  # version -> backwards to come that read it
        self._forward: dict[int, int] = {}  # micro-batch in flight -> the version its forward read
        self._log: list[tuple[int, int, int, int]] = []
        self._untouched = True  # no gradient of the coming update is there yet
        self.newest = 0
        self.peak = 1

    def begin(self, first: int, reads: npt.NDArray[np.int64]) -> None:
        """Begin a program after `first` optimizer steps; its micro-batch m reads version first + reads[m]."""
        assert not self._forward, "micro-batches are in flight"
        self._reads = (reads + first).tolist()
        versions, uses = np.unique(reads + first, return_counts=True)
        self._left = dict(zip(versions.tolist(), uses.tolist(), strict=True))
        self.newest = first
        self._leaves = {first: self._new_leaves()}
        self.peak = 1

    def forward(self, microbatch: int, work: Callable[[], Any]) -> Any:
        """Run `work` on the version that the micro-batch reads."""
        self._forward[microbatch] = self._reads[microbatch]
        return self._on(self._reads[microbatch], work)

    def backward(self, microbatch: int, work: Callable[[], None]) -> None:
        """Run `work` on the version of the micro-batch's forward; take its gradients; let go of unread ones."""
        forward, version = self._forward.pop(microbatch), self._reads[microbatch]
        self._on(version, work)
        self._log.append((self._index, microbatch, forward, version))
        self._collect(self._leaves[version])
        self._left[version] -= 1
        self._let_go(version)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The optimizer may change the parameters within; afterwards they are the next version."""
        if self._left.get(self.newest, 0):
            for parameter in set(self._own.values()):
                parameter.data = parameter.data.clone()
        yield
        self.newest += 1
        self._let_go(self.newest - 1)
        self._leaves[self.newest] = self._new_leaves()
        self.peak = max(self.peak, len(self._leaves))
        self._untouched = True

    def tensors(self, microbatch: int) -> list[Tensor]:
        """The weights that a micro-batch in flight reads."""
        return list(self._leaves[self._forward[microbatch]].values())

    def memory(self) -> list[Tensor]:
        """The tensors of all versions in memory."""
        return [leaf for leaves in self._leaves.values() for leaf in leaves.values()]

    def pop_records(self) -> npt.NDArray[np.int64]:
        """What each backward since the last call has read: the array `versions` of `engine.telemetry.records`."""
        rows, self._log = self._log, []
        return np.array(rows, dtype=np.int64).reshape(-1, VERSION_COLUMNS)

    def _on(self, version: int, work: Callable[[], Any]) -> Any:
        return functional_call(self._holder, dict(self._leaves[version]), (work,), tie_weights=False)

    def _new_leaves(self) -> dict[str, nn.Parameter]:
        """Leaves on the parameters' own memory, with version counters of their own (that is what `.data` gives)."""
        leaves = {parameter: nn.Parameter(parameter.data) for parameter in set(self._own.values())}
        return {name: leaves[parameter] for name, parameter in self._own.items()}

    def _let_go(self, version: int) -> None:
        if version != self.newest and not self._left.get(version, 0):
            self._leaves.pop(version, None)

    @torch.no_grad()
    def _collect(self, leaves: dict[str, nn.Parameter]) -> None:
        """Add the leaves' gradients to the parameters', as autograd adds them: in the order of the backwards."""
        for name, parameter in self._own.items():
            if self._untouched and parameter.grad is not None:
                raise _bypassed(name, self._holder)
        self._untouched = False
        for name, leaf in leaves.items():
            gradient, leaf.grad = leaf.grad, None
            parameter = self._own[name]
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
            elif gradient is not None:
                parameter.grad = gradient


def _bypassed(name: str, holder: nn.Module) -> RuntimeError:
    """`name` is that of the holder: layers.NUMBER.rest."""
    _, number, rest = name.split(".", 2)
    layer = type(holder.get_submodule(f"layers.{number}")).__name__
    return RuntimeError(
        f"{layer}.{rest} was read past its module's attributes: the layer keeps a reference to the parameter of its "
        "own, so an asynchronous schedule cannot give it the weights of another version. Let forward() look the "
        "parameter up as an attribute, or use a synchronous schedule"
    )
