"""What a layer's forward changes of its own: parameters, buffers and tensors that it keeps as attributes.

Found by one pass under FakeTensorMode, which sees every operator's writes and all that is saved for a backward. Memory
is compared, not version counters: writes through `.data` do not count there. BatchNorm's statistics are changed by an
operator that does not say so, which is why autograd lets them be: no backward in training reads them.

Two things cannot be right, and are refused before the start:

    a parameter that is changed    ranks that hold copies of it see other samples: the copies drift apart
    a change of what a backward    of an earlier micro-batch still needs: autograd refuses it in the middle of the run,
                                   or where it cannot see the change takes a gradient with other numbers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.plan.actions import Op, Program


class Changes(NamedTuple):
    """Names of what one forward of a layer has changed."""

    parameters: list[str]
    needed: list[str]  # of what it also keeps for its backward


class Holdings:
    """What a layer holds before its forward, and, with `saving` around that, what is saved for its backward."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())
        self._memory = {name: (tensor, memory_of(tensor)) for name, tensor in _held(module)}
        self._saved: set[int] = set()

    def saving(self) -> AbstractContextManager[Any]:
        """Around the forward: note what autograd saves for the backward."""
        return torch.autograd.graph.saved_tensors_hooks(self._see, lambda tensor: tensor)

    def _see(self, tensor: Tensor) -> Tensor:
        self._saved.add(memory_of(tensor))
        return tensor

    def changes(self, written: Mapping[int, Tensor]) -> Changes:
        """What the forward has changed; `written` is the memory that operators have written to since."""
        touched = [name for name, (_, memory) in self._memory.items() if memory in written]
        moved = [name for name, (tensor, memory) in self._memory.items() if memory_of(tensor) != memory]
        parameters = [name for name in self._parameters if name in touched or name in moved]
        return Changes(parameters, [name for name in touched if self._memory[name][1] in self._saved])


def memory_of(tensor: Tensor) -> int:
    """A number for the tensor's storage, equal for all views of it; its own where it has none (sparse)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):
        return -id(tensor)


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for at, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                yield f"{at}.{name}" if at else name, value


def check_changes(
    changes: Mapping[int, Changes], names: list[str], split: tuple[int, ...], compute: Program, replicas: int
) -> None:
    """Raise ValueError for changes that the schedule or replicas would make wrong; `changes` by layer."""
    for layer, found in changes.items():
        stage = max(s for s, first in enumerate(split) if first <= layer)
        if found.parameters and (replicas > 1 or compute.placement.copies > 1 or compute.asynchronous):
            raise ValueError(
                f"layer {names[layer]!r} changes its parameter {found.parameters[0]} in its forward (as "
                "nn.Embedding(max_norm=...) does), and copies of it, which see other samples, would drift apart: use "
                "data_parallel.replicas=1 and a synchronous schedule that keeps one copy of each stage (gpipe, 1f1b), "
                "or let the forward compute with a changed copy of the parameter"
            )
        if found.needed and _most_in_flight(compute, stage) > 1:
            raise ValueError(
                f"layer {names[layer]!r} changes {found.needed[0]} in place in its forward and needs it in its "
                f"backward, before which schedule {compute.name} runs the forwards of other micro-batches: use a copy "
                f"in the forward ({found.needed[0]}.clone()), or schedule=naive"
            )


def check_synchronised(modules: Sequence[nn.Module], names: Sequence[str], compute: Program, replicas: int) -> None:
    """Refuse nn.SyncBatchNorm where a stage has copies, over replicas or within a pipeline.

    It looks for them in a default process group, of which there is none, and would silently normalise over its own
    samples.
    """
    if replicas * compute.placement.copies == 1:
        return
    for name, module in zip(names, modules, strict=True):
        for at, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                where = f" ({at})" if at else ""
                raise ValueError(
                    f"layer {name!r} holds a SyncBatchNorm{where}, whose statistics are not yet taken over replicas "
                    "or over the two copies of a stage: use BatchNorm, which normalises each micro-batch, or "
                    "data_parallel.replicas=1 and a schedule that keeps one copy (gpipe, 1f1b)"
                )


def _most_in_flight(compute: Program, stage: int) -> int:
    """Micro-batches of a stage, on any rank, that are between their forward and the end of their backward."""
    most = 0
    for rank in range(compute.placement.ranks):
        live: set[int] = set()
        for action in compute.actions(rank):
            if action.stage == stage and action.op is Op.F:
                live.add(action.microbatch)
            elif action.stage == stage and action.op in (Op.B, Op.W):
                live.discard(action.microbatch)
            most = max(most, len(live))
    return most
