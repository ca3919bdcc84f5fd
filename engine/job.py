"""The frozen work order that every worker gets: settings, programs, split, and what crosses each boundary.

Pure data (no torch), which travels as such to every rank (`launch/handover.py`). Nothing in it is decided again later:
two ranks that hold the same job agree on every message of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.plan.actions import Placement, Program
from engine.plan.schedules import SCHEDULES
from engine.settings import Settings


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that crosses a stage boundary. `dtype` has no `torch.` prefix; strides are in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True)
class MessageSpec:
    """The nested tensors of one message between stages.

    `form` is the structure (`pipeline/messages/nesting.py`). `leaves` has a TensorSpec for each tensor, and constants
    as they are, in order.
    """

    form: Any
    leaves: tuple[TensorSpec | bool | int | float | str | None, ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The leaves that are tensors, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))


@dataclass(frozen=True)
class Layer:
    """One layer of the model, as the parent measured it once under FakeTensorMode."""

    name: str
    parameters: int  # elements
    trainable: int  # parameter tensors that require grad
    random: bool  # draws random numbers in training (dropout): it is seeded before each forward
    sends: tuple[int, int] | None = None  # bytes of an activation and of its gradient, if a stage ended here and could


@dataclass(frozen=True)
class Tie:
    """A weight that several layers share: `homes` are (layer, name in it), the first is its owner.

    `name` is the owner's in the unsplit model, `place` its number among the model's trainable parameters, layer by
    layer; None where it is frozen.
    """

    name: str
    homes: tuple[tuple[int, str], ...]
    place: int | None


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to know to run: settings, verified programs, split, message tables.

    `boundaries[(mode, rows)]`: what stage s sends to s+1 for a micro-batch of `rows` samples, for s = 0..S-2, and at
    S-1 the model's output; mode is "train" or "eval". An asynchronous schedule has `windows` and `streams` instead of
    `steps` and `passes`; `compute` is then the program of its first window.
    """

    settings: Settings
    placement: Placement
    layers: tuple[Layer, ...]
    split: tuple[int, ...]  # index of the first layer of each stage; split[0] == 0
    train_samples: int
    eval_samples: int
    compute: Program  # the verified compute-only program for the configured M
    steps: dict[int, Program]  # M -> lowered program with REDUCE (where `reduces`), STEP, GATHER (where divided)
    passes: dict[int, Program]  # M -> the same without these, for all but the last pass of an accumulation
    evaluations: dict[int, Program]  # M -> lowered forward-only program
    boundaries: dict[tuple[str, int], tuple[MessageSpec, ...]] = field(default_factory=dict)
    windows: tuple[int, ...] = ()  # of an asynchronous schedule: how many updates lie between its drains
    streams: dict[tuple[int, ...], Program] = field(default_factory=dict)  # micro-batches of updates -> lowered program
    random_loss: bool = False  # the loss may draw random numbers: it is seeded before each call
    ties: tuple[Tie, ...] = ()  # weights that layers share
    example: str = ""  # an input in words (`pipeline/cutting`), for which the model is cut where it is no list
    start: int = 0  # steps done before: those of the checkpoint that the run goes on from
    resumed: str | None = None  # its folder
    start_dir: str = "."
    run_dir: str = "."

    @property
    def microbatches(self) -> int:
        """Micro-batches of a full pass; of an update, where the schedule is asynchronous."""
        settings = self.settings
        return SCHEDULES[settings.schedule["name"]].per_update(settings.pipeline.microbatches)

    @property
    def ranks(self) -> int:
        """P, the ranks of one pipeline."""
        return self.placement.ranks

    @property
    def replicas(self) -> int:
        """R, the copies of the pipeline."""
        return self.settings.data_parallel.replicas

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed over ranks: over replicas, or over two copies of each stage."""
        return self.replicas * self.placement.copies > 1

    @property
    def world(self) -> int:
        """The number of ranks over all replicas, P x R."""
        return self.ranks * self.replicas
