"""The waterfall of a measured step: from perfect work to the measured time, one real thing more at each bar.

    work        all computation, each at what is usual for its stage, shared evenly by the ranks
    schedule    + the program, every computation of a kind taking the same: the schedule's own bubble
    imbalance   + each stage taking what is usual for it
    variation   + each computation taking what it took
    transfer    + messages under way as long as they were
    reduce      + replicas waiting for each other, and the part of their reduction, and of gathering what each of them
                has updated, that nothing hid
    optimizer   + the exchange of norms, clipping, updating: the tail of the step
    data        + loading
    rest        what was measured beyond that: launching, the interpreter, clocks, and what the others do not explain

Each bar is the replay of the same program (`replay.py`) with the next thing switched on, less the one before, so their
order matters: what two causes cost only together goes to the later one. Bars are integer nanoseconds and add up to the
measured time exactly; one can be negative (where computations that vary happen to fit better than equal ones).

Usual is the median over a stage's micro-batches. With their mean, one late micro-batch would count as a slow stage.
Of several replicas the fastest gives the first three bars; variation and transfer count where they are largest. So one
replica slower than the others shows in `reduce`, where they wait for it, with all that it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.account.replay.observed import Observed, observe
from engine.account.replay.replay import Replay
from engine.categories import WATERFALL
from engine.job import Job
from engine.plan.actions import Program
from engine.plan.dependencies import Flat
from engine.plan.timeline import Kind, Timeline

BARS = tuple(bar.name for bar in WATERFALL)
MOST_COMPUTATIONS = 20_000  # of all ranks: beyond, a replay would take seconds

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Waterfall:
    """The waterfall of a step, in nanoseconds.

    `bars`, as in BARS, add up to `total`, the step's time. `waiting`: the part of the bar `reduce` that is waiting for
    slower replicas. `alone`: what each replica's pipeline would have taken by itself.
    """

    bars: tuple[int, ...]
    waiting: int
    alone: tuple[int, ...]

    @property
    def total(self) -> int:
        """Nanoseconds of the measured step."""
        return sum(self.bars)

    def __getitem__(self, name: str) -> int:
        return self.bars[BARS.index(name)]


def missing(job: Job) -> str:
    """Why a step of this job has no waterfall, where it has none; one sentence."""
    computations = len(job.compute) * job.settings.train.accumulate * job.replicas
    if job.windows:
        return f"No waterfall: updates of {job.compute.name} overlap, and none is a step that could be run by itself."
    if computations > MOST_COMPUTATIONS:
        most = f"more than the {MOST_COMPUTATIONS:,} up to which a step is run again on paper"
        return f"No waterfall: a step has {computations:,} computations, {most}."
    return "No waterfall: not every rank ran all of its program, as in a short last batch."


class Average:
    """The mean of the waterfalls of several steps, in seconds."""

    def __init__(self, replicas: int) -> None:
        self.steps = self._waiting = 0
        self._bars, self._alone = [0] * len(BARS), [0] * replicas

    def add(self, waterfall: Waterfall) -> None:
        """Add the waterfall of one more step to the mean."""
        self.steps += 1
        self._waiting += waterfall.waiting
        self._bars = [total + bar for total, bar in zip(self._bars, waterfall.bars, strict=True)]
        self._alone = [total + alone for total, alone in zip(self._alone, waterfall.alone, strict=True)]

    @property
    def bars(self) -> dict[str, float]:
        """Seconds by name, in the order of BARS."""
        return {name: total / self.steps * 1e-9 for name, total in zip(BARS, self._bars, strict=True)}

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self._bars) / self.steps * 1e-9

    @property
    def waiting(self) -> float:
        """Seconds of the bar `reduce` that are waiting for slower replicas."""
        return self._waiting / self.steps * 1e-9

    @property
    def alone(self) -> list[float]:
        """Seconds that the pipeline of each replica would take by itself."""
        return [total / self.steps * 1e-9 for total in self._alone]


class Waterfalls:
    """Makes the waterfall of each step of a compute-only program; `passes` as in `observe`."""

    def __init__(self, program: Program, replicas: int, passes: int = 1) -> None:
        self._program, self._replicas, self._passes = program, replicas, passes
        flat = Flat(program)
        self._kind, self._place = flat.op, flat.op * program.stages + flat.stage
        self._replays: dict[tuple[int, bool, bool, bool], Replay] = {}
        self.observed: Observed | None = None  # the last step, where it had a waterfall

    def of(self, timeline: Timeline) -> Waterfall | None:
        """The waterfall of a step; None where it was not a whole one of the program, or where that is too large."""
        self.observed = None
        if len(self._program) * self._replicas > MOST_COMPUTATIONS:
            return None
        self.observed = observed = observe(timeline, self._program, self._passes)
        if observed is None:
            return None
        alone = np.array([self._alone(observed, replica) for replica in range(self._replicas)])
        fastest = alone[alone[:, 2].argmin()]
        grown = np.diff(alone, axis=1).max(axis=0)  # of all replicas
        apart = [*fastest[:3], fastest[2] + grown[2], fastest[2] + grown[2] + grown[3]]
        levels = [*apart, *self._together(observed, timeline, apart[-1])]
        waiting = levels.pop()
        rounded = [0, *(round(level) for level in levels), observed.time]
        bars = tuple(after - before for before, after in pairwise(rounded))
        return Waterfall(bars, round(waiting), tuple(round(level) for level in alone[:, 4].tolist()))

    def _alone(self, seen: Observed, replica: int) -> list[float]:
        """One replica's pipeline by itself: work, and the period of a step as things are switched on up to transfer."""
        own = seen.duration[replica].astype(np.float64)
        usual = _by_group(own, self._place, np.median)
        replay = self._replay(1)

        return [
            float(usual.sum()) / self._program.ranks,
            replay.period(duration=_by_group(usual, self._kind, np.mean)),
            replay.period(duration=usual),
            replay.period(duration=own),
            replay.period(duration=own, delay=seen.delay[replica]),
        ]

    def _together(self, seen: Observed, timeline: Timeline, apart: float) -> list[float]:
        """The period of all replicas together: with reductions, with updates, with loading; and what of the first is
        waiting for slower replicas. `apart`: the period without all that.
        """
        reduced = self._replicas > 1 or bool((timeline.kind == Kind.REDUCE).any())
        normed, gathered = (bool((timeline.kind == kind).any()) for kind in (Kind.WAIT_NORM, Kind.GATHER))
        moving: dict[str, Any] = {"duration": seen.duration, "delay": seen.delay}
        summing = moving | {"reduce": seen.reduce, "gather": seen.gather, "count": seen.count}
        updating = summing | {"norm": seen.norm, "step": seen.step}
        coupled, whole = (self._replay(self._replicas, reduced, then, gathered) for then in (False, normed))
        return [
            coupled.period(**summing) if reduced else apart,
            whole.period(**updating),
            whole.period(**updating, loaded=seen.loaded),
            coupled.period(**moving) - apart if reduced else 0.0,
        ]

    def _replay(self, replicas: int, reduced: bool = False, normed: bool = False, gathered: bool = False) -> Replay:
        key = replicas, reduced, normed, gathered
        if key not in self._replays:
            self._replays[key] = Replay(self._program, *key)
        return self._replays[key]


def _by_group(values: _Floats, group: npt.NDArray[np.int64], usual: Callable[[_Floats], Any]) -> _Floats:
    """Each value replaced by what is usual for its group."""
    found = np.empty_like(values)
    for number in np.unique(group):
        found[group == number] = usual(values[group == number])
    return found
