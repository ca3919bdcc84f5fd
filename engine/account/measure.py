"""The three bubbles of a run, from running sums over its traced steps; no step's spans are kept but the last one's.

    ideal      the schedule simulated with each kind of action at its mean over all stages, free transfer
    predicted  simulated with the mean measured cost of each action, free transfer
    measured   from the spans: mean over ranks of 1 - compute / window

ideal -> predicted is imbalance; predicted -> measured is transfer, jitter and overhead. The first traced step warms
up caches and connections: it counts only as long as it is the only one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.account.bubble import Account, account
from engine.account.overlap import Overlap, overlap
from engine.account.replay.observed import Observed, durations
from engine.account.replay.waterfall import Average, Waterfall, Waterfalls
from engine.categories import NAMES
from engine.job import Job
from engine.plan.actions import COMPUTE, Op, Placement, Program
from engine.plan.simulate import Costs, figures, simulate
from engine.plan.timeline import COMPUTE_KINDS, Timeline

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Bubbles:
    """The bubbles and costs of a run, in seconds; fractions over the total.

    W: world, S: stages, M: micro-batches of a step.

    `seconds` [W, 9] as in `bubble.NAMES` and `per_rank` [W] are means over `steps` traced steps; `latency` [S] is the
    mean over messages between stages s and s+1. What follows is None where no step had all its micro-batches: `costs`
    [4, S, M] (F, B, I, W), the simulated bubbles and steps, and the mean `waterfall`.
    """

    steps: int
    seconds: Floats
    per_rank: Floats
    latency: Floats
    costs: Floats | None = None
    ideal: float | None = None
    predicted: float | None = None
    ideal_step: float | None = None
    predicted_step: float | None = None
    simulated: Timeline | None = None
    waterfall: Average | None = None
    steady: bool = False  # of an asynchronous schedule: the steps are those of its steady state
    with_transfer: float | None = None  # of an asynchronous schedule: predicted, messages taking `latency`
    explained: float | None = None  # the same, and each computation as long as it was; None where no window is whole
    overlap: Overlap | None = None  # of the replicas' reduction, summed over the steps

    @property
    def measured(self) -> float:
        """The measured bubble: the mean over ranks of 1 - compute / window."""
        return float(self.per_rank.mean())

    @property
    def stage_costs(self) -> Floats | None:
        """All compute of one micro-batch, by stage: [S]."""
        if self.costs is None:
            return None
        return np.asarray(self.costs.sum(axis=0).mean(axis=1), dtype=np.float64)


def fractions(table: npt.NDArray[np.int64]) -> Floats:
    """Each name's share of the rank's window: [W, 9]; 0 where a window is empty."""
    shares: Floats = table / np.maximum(1, table.sum(axis=1, keepdims=True))
    return shares


class Measure:
    """Running sums over traced steps.

    Where replicas are asynchronous they do not share a step: what is made of a whole one is made of the first's.
    """

    def __init__(self, job: Job) -> None:
        self._ranks, self._world, self._replicas = job.ranks, job.world, job.replicas
        self._together = (
            1 if job.settings.data_parallel.asynchronous else job.replicas
        )  # replicas whose step is looked at as one
        self._passes = job.settings.train.accumulate
        self.program = repeated(job.compute, self._passes)
        self._microbatches = job.compute.microbatches
        self._stages = job.placement.stages
        self._sums = Sums.zero(job.world, self._stages, self._microbatches)
        self._added = 0
        self._waterfalls = Waterfalls(self.program, self._together, self._passes)
        self._average = Average(self._together)
        self.waterfall: Waterfall | None = None  # of the last traced step, where it had all its micro-batches
        self.overlap: Overlap | None = None  # of the last traced step, where gradients are reduced
        self._overlap: Overlap | None = None  # of all that count
        self._reduces = job.reduces and not job.settings.data_parallel.asynchronous
        self.observed: Observed | None = None  # the last traced step, where it was a whole one
        self.last: Timeline | None = None  # the last traced step, as far as it is looked at as one
        self.shown: Timeline | None = None  # the same
        self.last_whole: Timeline | None = None  # the last that had all its micro-batches

    def add(self, timeline: Timeline, step: int = 0) -> Account:
        """Take in one traced step, the spans of all ranks; which one it is does not matter."""
        found = account(timeline, self._ranks, self._stages)
        if self._added == 1:
            self._sums = Sums.zero(self._world, self._stages, self._microbatches)
            self._average, self._overlap = Average(self._together), None
        self._added += 1
        self._sums.take(found)
        whole = self._add_costs(timeline)
        timeline = timeline.first(self._together * self._ranks)
        waterfall = self._waterfalls.of(timeline) if whole else None
        self.observed = self._waterfalls.observed if whole else None
        if waterfall is not None:
            self._average.add(waterfall)
        reduced = overlap(timeline) if self._reduces else None
        if reduced is not None:
            self._overlap = reduced if self._overlap is None else self._overlap + reduced
        self.last = self.shown = timeline
        self.waterfall, self.overlap = waterfall, reduced
        self.last_whole = timeline if whole else self.last_whole
        return found

    def _add_costs(self, timeline: Timeline) -> bool:
        """Durations of a step in which every stage ran every micro-batch of every pass; of others none, and false."""
        stages, microbatches = self._stages, self._microbatches
        here = np.isin(timeline.kind, COMPUTE_KINDS) & (timeline.microbatch >= 0) & (timeline.microbatch < microbatches)
        here &= (timeline.stage >= 0) & (timeline.stage < stages)
        place = (timeline.kind[here], timeline.stage[here], timeline.microbatch[here])
        count = np.zeros((len(COMPUTE), stages, microbatches), dtype=np.int64)
        np.add.at(count, place, 1)
        if (count[Op.F] != self._replicas * self._passes).any():
            return False
        self._sums.count += count
        np.add.at(self._sums.duration, place, durations(timeline)[here])
        return True

    def result(self) -> Bubbles | None:
        """The bubbles over all steps so far; None where none was traced."""
        sums = self._sums
        if not sums.steps:
            return None
        means = sums.means()
        if not sums.count.any():
            return Bubbles(sums.steps, *means, overlap=self._overlap)
        costs, equal = sums.costs()
        simulated = self._simulate(costs)
        ideal = figures(self.program, self._simulate(equal))
        predicted = figures(self.program, simulated)
        return Bubbles(
            sums.steps, *means, costs, ideal.bubble_fraction, predicted.bubble_fraction,
            ideal.makespan, predicted.makespan, simulated, self._average if self._average.steps else None,
            overlap=self._overlap,
        )  # fmt: skip

    def _simulate(self, costs: Floats) -> Timeline:
        return simulate(self.program, Costs(np.tile(costs, (1, 1, self._passes)), np.zeros(self._stages)))


@dataclass
class Sums:
    """Sums over steps, in nanoseconds; `bubble` sums fractions."""

    table: npt.NDArray[np.int64]
    bubble: Floats
    latency: npt.NDArray[np.int64]
    messages: npt.NDArray[np.int64]
    duration: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    steps: int = field(default=0)

    @classmethod
    def zero(cls, world: int, stages: int, microbatches: int) -> Sums:
        """Sums over no step, of arrays of these sizes."""

        def zeros(*shape: int) -> npt.NDArray[np.int64]:
            return np.zeros(shape, dtype=np.int64)

        each = (len(COMPUTE), stages, microbatches)
        edges = (zeros(stages), zeros(stages))
        return cls(zeros(world, len(NAMES)), np.zeros(world), *edges, zeros(*each), zeros(*each))

    def take(self, found: Account) -> None:
        """Add the account of a step."""
        self.steps += 1
        self.table += found.table
        self.latency += found.latency
        self.messages += found.messages
        self.bubble += 1 - fractions(found.table)[:, NAMES.index("compute")]

    def means(self) -> tuple[Floats, Floats, Floats]:
        """The means over steps that are `seconds`, `per_rank` and `latency` of Bubbles."""
        latency = self.latency / np.maximum(1, self.messages) * 1e-9
        return self.table / self.steps * 1e-9, self.bubble / self.steps, latency

    def costs(self) -> tuple[Floats, Floats]:
        """`costs` of Bubbles, and the same with every kind of action at its mean over all stages."""
        costs = self.duration / np.maximum(1, self.count) * 1e-9
        equal = self.duration.sum(axis=(1, 2)) / np.maximum(1, self.count.sum(axis=(1, 2))) * 1e-9
        return costs, np.broadcast_to(equal[:, None, None], costs.shape)


def repeated(program: Program, passes: int) -> Program:
    """`passes` runs of a compute-only program one after another, micro-batches counted on: what a step executes."""
    if passes == 1:
        return program
    rows = tuple(np.concatenate([row + i * program.microbatches for i in range(passes)]) for row in program.rows)
    placed = program.placement
    placement = Placement(placed.ranks, placed.rank_of, placed.direction[: program.microbatches] * passes)
    return Program(program.name, placement, program.microbatches * passes, rows)
