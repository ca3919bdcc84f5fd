"""Step time against memory: the jobs that no other beats in both.

Where jobs differ in their global batch their step times are not comparable, and the time per sample takes their place.
Plans know no samples: they are compared with those of as many ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.report.sweep.results import (
    BATCH,
    COST,
    KEPT,
    MEMORY,
    MICROBATCHES,
    RANKS,
    RATE,
    STEP,
    Metric,
    Result,
    Sweep,
)


@dataclass(frozen=True)
class Front:
    """The Pareto front of time and memory among some jobs.

    `points`: all jobs as (time, memory, job); `best`: which of them lie on the front, the fastest first. `among`: which
    jobs these are, in words, where it is not all of them.
    """

    time: Metric
    memory: Metric
    points: tuple[tuple[float, float, Result], ...]
    best: tuple[int, ...]
    among: str = ""

    @property
    def title(self) -> str:
        """What is compared with what, such as "step time against peak memory"."""
        return f"{self.time.name} against {self.memory.name}" + (f", {self.among}" if self.among else "")


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the points that no other dominates, by the first coordinate; smaller is better in both.

    A point dominates another where it is nowhere worse and somewhere better; equal points stay together.
    """
    found: list[int] = []
    least = float("inf")
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        memory = points[index][1]
        if memory < least or (found and points[index] == points[found[-1]]):
            found.append(index)
            least = memory
    return found


def fronts(sweep: Sweep) -> list[Front]:
    """The fronts of the jobs that trained and of those that were planned; each where there are at least two."""
    trained = sweep.known(STEP)
    per_sample = len({result.number(BATCH) for result in trained}) > 1
    time = replace(STEP, key="per sample", name="time per sample", text=lambda v: f"{v * 1e3:.3f} ms")
    found = [_front(trained, time if per_sample else STEP, MEMORY, "")]
    sizes: dict[tuple[int, int], list[Result]] = {}
    for result in sweep.known(COST):
        sizes.setdefault((result.number(RANKS) or 0, result.number(MICROBATCHES) or 0), []).append(result)
    for (ranks, microbatches), own in sorted(sizes.items()):
        among = f"{ranks} ranks, {microbatches} micro-batches" if len(sizes) > 1 else ""
        found.append(_front(own, COST, KEPT, among))
    return [each for each in found if each is not None]


def _front(results: Sequence[Result], time: Metric, memory: Metric, among: str) -> Front | None:
    points = tuple(
        (seconds, result.figures[memory.key], result)
        for result in results
        if memory.key in result.figures and (seconds := time_of(result, time)) is not None
    )
    if len(points) < 2:
        return None
    return Front(time, memory, points, tuple(front([point[:2] for point in points])), among)


def time_of(result: Result, time: Metric) -> float | None:
    """A job's time by `time`, in its unit: of a step or of a sample; None where it is not known."""
    if time.key == "per sample":
        rate = result.figures.get(RATE.key)
        return 1 / rate if rate else None
    return result.figures.get(time.key)
