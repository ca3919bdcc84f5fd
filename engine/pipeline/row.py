"""What the executor is given: its rank's row of a program, unpacked, and what to feed it with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from engine.pipeline.messages.boundary import MessageTable
from engine.pipeline.stage.stage import Draw
from engine.plan.actions import Action, Op, Placement, Program

Unit = tuple[Action, ...]  # one action, or an overlapped pair


class Row(NamedTuple):
    """A rank's row of a program as the executor takes it."""

    units: Iterable[Unit]
    halves: frozenset[tuple[int, int]]  # (stage, micro-batch) whose backward is I and W
    closing: frozenset[tuple[int, int]]  # the same of the last B or W of each stage that is reduced
    placement: Placement  # which way a micro-batch goes depends on how many there are


def row_of(program: Program, rank: int) -> Row:
    """The row unpacked, to be run again in every step."""
    actions = program.actions(rank)
    units = [(action, next(actions)) if action.fused else (action,) for action in actions]
    flat = [action for unit in units for action in unit]
    halves = frozenset((a.stage, a.microbatch) for a in flat if a.op is Op.I)
    last = {a.stage: a.microbatch for a in flat if a.op in (Op.B, Op.W)}
    closing = frozenset((a.stage, last[a.stage]) for a in flat if a.op is Op.REDUCE and a.stage in last)
    return Row(units, halves, closing, program.placement)


def long_row_of(program: Program, rank: int) -> Row:
    """The row of an asynchronous program, to be run once: unpacked on the way, because it may be long."""
    return Row(((action,) for action in program.actions(rank)), frozenset(), frozenset(), program.placement)


@dataclass
class Feed:
    """What the ends of a pipeline need for one pass of micro-batches; `sizes[m]` samples in micro-batch m."""

    sizes: Sequence[int]
    input: Callable[[int], Any]  # on the first stage's rank
    target: Callable[[int], Any]  # on the last stage's rank
    draw: Callable[[int], Draw]
    loss: Callable[[Any, Any], Tensor]  # sum over a micro-batch
    count: Callable[[int], float]  # what a micro-batch's global batch counted; may wait for the other replicas
    messages: MessageTable  # what stages hand on, by the samples of a micro-batch
    updated: Callable[[], None] | None = None  # called behind each update of the program
    evaluated: Callable[[Any, Any, int], None] | None = None  # output, target, micro-batch: given in evaluation only
    losses: dict[int, Tensor] = field(default_factory=dict)  # filled: micro-batch -> loss sum

    @property
    def training(self) -> bool:
        """Whether graphs are kept for backwards."""
        return self.evaluated is None
