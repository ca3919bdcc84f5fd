"""The programs that a step may run, for a run of the engine and for `engine.Pipeline` alike: proven before they run.

step         lowered, with REDUCE (where a stage has copies), STEP, and GATHER (where the optimizer is divided)
pass         the same without these: all but the last pass of an accumulation
evaluation   forward only
idle         the step of a replica without samples: it takes part in reductions and update
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.plan.actions import Action, Op, Placement, Program
from engine.plan.lowering import lower
from engine.plan.schedules import SCHEDULES, largest_legal_microbatches
from engine.plan.schedules import build as build_schedule
from engine.plan.schedules.forward_only import evaluation
from engine.plan.verify import verify, verify_idle

Updates = tuple[int, ...]  # micro-batches of each update of an asynchronous program


class Proven(dict[Any, Program]):
    """Programs by their number of micro-batches (or by `Updates`), each made and verified when first asked for."""

    def __init__(self, make: Callable[[Any], Program]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Program:
        self[key] = self._make(key)
        return self[key]


@dataclass(frozen=True)
class StepPrograms:
    """All programs of a schedule on `ranks`, configured for `microbatches`.

    `replicas` are copies of the whole pipeline; `gather`: the optimizer is divided over them. Building it raises
    ValueError where the schedule is not defined, or not for this many ranks and micro-batches.
    """

    schedule: str
    ranks: int
    microbatches: int
    options: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1
    gather: bool = False

    configured: Program = field(init=False)  # compute-only, for the configured number of micro-batches

    def __post_init__(self) -> None:
        compute = build_schedule(self.schedule, self.ranks, self.microbatches, self.options)
        verify(compute, SCHEDULES[self.schedule].ascending)
        object.__setattr__(self, "configured", compute)

    @property
    def placement(self) -> Placement:
        """Which rank holds which stage."""
        return self.configured.placement

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed over ranks: over replicas, or over two copies of each stage."""
        return self.replicas * self.placement.copies > 1

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule updates without draining the pipeline: it has streams instead of steps."""
        return SCHEDULES[self.schedule].stream is not None

    def compute(self, microbatches: int) -> Program:
        """The compute-only program for this many micro-batches.

        Where the schedule is not defined for them: that of the largest number below for which it is, and where there
        is none, all forwards and then all backwards on the same placement.
        """
        if microbatches == self.microbatches:
            return self.configured
        legal = largest_legal_microbatches(self.schedule, self.ranks, microbatches, self.options)
        if legal:
            return build_schedule(self.schedule, self.ranks, legal, self.options)
        return _all_forward_all_backward(self.configured, microbatches)

    def steps(self) -> Proven:
        """Programs of whole steps, by the number of micro-batches; 0 is the idle one."""
        return Proven(lambda m: self._step(m) if m else self.idle([self._step(self.microbatches)]))

    def passes(self) -> Proven:
        """Programs of passes before the last of an accumulation, by the number of micro-batches."""
        return Proven(lambda m: self._lowered(self.compute(m), reduce=False, step=False))

    def evaluations(self) -> Proven:
        """Forward-only programs, by the number of micro-batches."""
        return Proven(lambda m: self._lowered(evaluation(self.placement, m), reduce=False, step=False))

    def streams(self) -> Proven:
        """Programs of an asynchronous schedule between two drains, by the micro-batches of each update."""
        return Proven(self._stream)

    def idle(self, others: Iterable[Program]) -> Program:
        """The step of a replica without samples, verified against the steps of `others`."""
        program = idle_step(self.placement, self.reduces, self.gather)
        verify_idle(program, others)
        return program

    def stream(self, updates: Updates) -> Program:
        """The compute-only program of an asynchronous schedule: `updates[k]` micro-batches in the k-th update."""
        stream = SCHEDULES[self.schedule].stream
        assert stream is not None, f"{self.schedule} is synchronous"
        return stream.build(self.ranks, updates, **self.options)

    def _step(self, microbatches: int) -> Program:
        return self._lowered(self.compute(microbatches), reduce=self.reduces, step=True, gather=self.gather)

    def _stream(self, updates: Updates) -> Program:
        program = lower(self.stream(updates), reduce=self.replicas > 1, step=True)
        verify(program)
        return program

    def _lowered(self, program: Program, reduce: bool, step: bool, gather: bool = False) -> Program:
        found = lower(program, reduce, step, gather)
        verify(found, SCHEDULES[program.name].ascending)
        return found


def idle_step(placement: Placement, reduce: bool, gather: bool) -> Program:
    """The reductions, the update and the gatherings of a step, and nothing else."""
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        reductions = [Action(s, Op.REDUCE) for s in reversed(stages)] if reduce else []
        gathers = [Action(s, Op.GATHER) for s in stages] if gather else []
        rows.append([*reductions, Action(stages[0], Op.STEP), *gathers])
    return Program.of("idle", replace(placement, direction=()), 0, rows)


def _all_forward_all_backward(configured: Program, microbatches: int) -> Program:
    placement = replace(configured.placement, direction=configured.placement.direction[:microbatches])
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        forward = [Action(s, Op.F, m) for s in stages for m in range(microbatches) if placement.rank(s, m) == rank]
        backward = [Action(a.stage, Op.B, a.microbatch) for a in forward]
        rows.append(forward + sorted(backward, key=lambda a: (-a.stage, a.microbatch)))
    return Program.of(configured.name, placement, microbatches, rows)
