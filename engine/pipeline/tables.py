"""What all ranks of a pipeline must agree on: programs, split, and what crosses each boundary.

JobTables      as a run has proven them before it started its workers
FoundTables    found out by every rank alike when they are first needed: programs by the number of micro-batches,
               messages by the shapes of a batch, under FakeTensorMode as for a run
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.job import Job, MessageSpec, Tie
from engine.pipeline.batches.batch import ReplicaBatch
from engine.pipeline.batches.microbatch import take
from engine.pipeline.dtypes import in_precision
from engine.pipeline.inspection.changes import check_changes, check_synchronised
from engine.pipeline.inspection.fake_model import FakeModel
from engine.pipeline.layers import GivenLayer, fakes_of
from engine.pipeline.losses import Loss
from engine.pipeline.messages.boundary import MessageTable
from engine.pipeline.ties import check_ties, stage_sets
from engine.plan.actions import Placement, Program
from engine.plan.partition import manual, partition
from engine.plan.programs import StepPrograms, Updates


class Tables(ABC):
    """Programs, split and messages of a pipeline.

    `names`, `trainable`: of each layer its name and how many parameter tensors require grad; `ties`: those that layers
    share. `draws`: layers that draw
    random numbers in training, and the number behind the last where the loss does; it may grow.
    """

    placement: Placement
    split: tuple[int, ...]
    names: Sequence[str]
    trainable: tuple[int, ...]
    ties: tuple[Tie, ...]
    draws: set[int]
    steps: Mapping[int, Program]
    passes: Mapping[int, Program]
    evaluations: Mapping[int, Program]
    streams: Mapping[Updates, Program]

    @abstractmethod
    def programs(self) -> Iterable[Program]:
        """Programs that use all channels between them."""

    @abstractmethod
    def messages(self, training: bool, batch: ReplicaBatch | None = None) -> MessageTable:
        """What stages hand on for micro-batches of `batch`, which JobTables need not see."""


class JobTables(Tables):
    """Tables of a job: proven before its workers start."""

    def __init__(self, job: Job) -> None:
        self.placement, self.split = job.placement, job.split
        self.names = [layer.name for layer in job.layers]
        self.trainable, self.ties = tuple(layer.trainable for layer in job.layers), job.ties
        self.draws = {number for number, layer in enumerate(job.layers) if layer.random}
        self.draws |= {len(job.layers)} if job.random_loss else set()
        self.steps, self.passes, self.evaluations, self.streams = job.steps, job.passes, job.evaluations, job.streams
        self._messages = {
            training: MessageTable(lambda rows, mode=mode: job.boundaries[mode, rows])  # type: ignore[misc]
            for training, mode in ((True, "train"), (False, "eval"))
        }

    def programs(self) -> Iterable[Program]:
        """Programs that use all channels between them."""
        return [*self.steps.values(), *self.streams.values(), *self.evaluations.values()]

    def messages(self, training: bool, batch: ReplicaBatch | None = None) -> MessageTable:
        """What stages hand on for micro-batches: the job's."""
        return self._messages[training]


class FoundTables(Tables):
    """Tables of `engine.Pipeline`, found from its layers and batches.

    `split` names the layers that begin stages 1..S-1; None: as even by parameters as can be. ValueError for layers,
    splits and batches that cannot be.
    """

    def __init__(
        self,
        layers: Sequence[GivenLayer],
        loss: Loss,
        programs: StepPrograms,
        split: Sequence[str] | None,
        device: torch.device,
        dtype: torch.dtype | None,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._programs, self._loss, self._device, self._dtype = programs, loss, device, dtype
        self._model = model = FakeModel(lambda: fakes_of(layers), device, dtype, autocast)
        self.placement, self.names = programs.placement, model.names
        stages = self.placement.stages
        if split is not None:
            self.split = manual(model.names, split, stages)
        else:
            self.split = partition([float(n) for n in model.parameters], stages)
        self.trainable = tuple(layer.trainable for layer in model.layers())
        self.ties = model.ties
        check_ties(stage_sets(self.ties, self.split), programs.asynchronous, f"schedule={programs.schedule!r}")
        trained = [p.dtype for module in model.modules for p in module.parameters() if p.requires_grad]
        self.dtype = dtype or next(iter(trained), torch.float32)  # the parameters'
        self.draws = set(model.draws)
        self.steps, self.passes = programs.steps(), programs.passes()
        self.evaluations, self.streams = programs.evaluations(), programs.streams()
        self._messages: dict[Any, MessageTable] = {}
        check_synchronised(model.modules, model.names, programs.configured, programs.replicas)

    def programs(self) -> Iterable[Program]:
        """Programs that use all channels between them."""
        configured = self._programs
        whole = self.streams[(1,)] if configured.asynchronous else self.steps[configured.microbatches]
        return [whole, self.evaluations[1]]

    def messages(self, training: bool, batch: ReplicaBatch | None = None) -> MessageTable:
        """What stages hand on for micro-batches cut from batches of the shapes of `batch`."""
        assert batch is not None
        key = training, *(_signature(value, batch.rows) for value in (batch.given, batch.target))
        if key not in self._messages:
            like = ReplicaBatch(_emptied(batch.given), _emptied(batch.target), batch.pieces)
            self._messages[key] = MessageTable(lambda rows: self._specs(training, like, rows))
        return self._messages[key]

    def _specs(self, training: bool, like: ReplicaBatch, rows: int) -> tuple[MessageSpec, ...]:
        def batch() -> tuple[Any, Any]:
            given, target = (pytree.tree_map(self._fake, value) for value in (like.given, like.target))
            return take(given, 0, rows, like.rows), take(target, 0, rows, like.rows)

        specs = self._model.handed_on(batch, rows, self.split, training, self._loss)
        self.draws |= self._model.draws | ({len(self.names)} if self._model.random_loss else set())
        configured = self._programs.configured
        check_changes(self._model.changes, list(self.names), self.split, configured, self._programs.replicas)
        return specs

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = in_precision(leaf.dtype, self._dtype)
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype, device=self._device)


def _signature(value: Any, rows: int) -> str:
    """What messages depend on: shapes without the number of samples, strides, dtypes, and constants."""

    def leaf(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        shape = ("rows", *item.shape[1:]) if item.dim() and item.shape[0] == rows else tuple(item.shape)
        return shape, item.stride(), item.dtype

    return repr(pytree.tree_map(leaf, value))


def _emptied(value: Any) -> Any:
    """The nesting with tensors of the meta device, which hold no memory."""
    return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, value)
