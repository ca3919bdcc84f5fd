"""What more replicas, or more ranks, bring: speed-up and efficiency, with the law that applies fitted to them.

Jobs belong together that were given the same but for the number of workers. Where their global batch is the same they
do the same work, and Amdahl's law is asked; where it grows in proportion to the workers, Gustafson's. A sweep over both
(`data_parallel.replicas=1,2,4 train.global_batch_size=32,64,128`) has curves of either kind.

Of a pipeline the serial part is known: GPipe and 1F1B over n equal ranks take (M+n-1)/(M n) of one rank's step, which
is Amdahl's law with s = 1/M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from engine.report.sweep.laws import Fit, fit_amdahl, fit_gustafson
from engine.report.sweep.results import BATCH, RANKS, RATE, REPLICAS, SEED, STEP, Result, Sweep, word
from engine.tables import percent

POOR = 0.1  # a mean deviation from a law that is said to be far off


@dataclass(frozen=True)
class Curve:
    """Jobs that differ in their number of workers, and the law that was fitted to them.

    `points` over `key`, each (workers, seconds per step, samples per second, job). `common`: what else was swept and is
    the same in all, in words. `batch`: the global batch of all, or of each worker where it grows.
    """

    key: str
    common: str
    grows: bool
    batch: Fraction
    points: tuple[tuple[int, float, float, Result], ...]
    fit: Fit

    @property
    def one(self) -> float:
        """Seconds of one worker's step, or its samples per second where the batch grows; fitted if not measured."""
        measured = [rate if self.grows else seconds for n, seconds, rate, _ in self.points if n == 1]
        return sum(measured) / len(measured) if measured else self.fit.one

    def speedup(self, point: tuple[int, float, float, Result]) -> float:
        """The measured speed-up at a point of the curve, over one worker."""
        return point[2] / self.one if self.grows else self.one / point[1]

    @property
    def sentence(self) -> str:
        """Which law applies, why, and what it says."""
        fit, workers = self.fit, word(self.key)
        if self.grows:
            why = f"The global batch grows with the {workers} ({self.batch} samples each)"
            limit = f"every further one adds {1 - fit.serial:.2f} of one, without a limit"
        else:
            why = f"The global batch is {self.batch} throughout"
            limit = f"at most {fit.limit:.1f} times one" if fit.limit else "no limit"
        how = f"Fitted to within {percent(fit.deviation)}"
        if fit.deviation > POOR:
            how += ", which is far off: the law does not describe this"
        elif fit.exact and fit.deviation < 1e-6:
            how = "Two sizes are always met: measure a third to see whether the law holds"
        return f"{why}: {fit.law}'s law. Serial fraction {percent(fit.serial)}: {limit}. {how}."

    @property
    def gains(self) -> str:
        """The speed-ups in a line."""
        told = (f"{point[0]}: {self.speedup(point):.2f} ({self.fit.speedup(point[0]):.2f})" for point in self.points)
        return f"speed-up by {word(self.key)}, measured (and {self.fit.law}'s)  {'   '.join(told)}"


def curves(sweep: Sweep) -> tuple[list[Curve], list[str]]:
    """All curves over replicas and over ranks, and a sentence for each of the two that was swept without giving one."""
    found, refused = [], []
    for key in (REPLICAS, RANKS):
        if key not in sweep.swept or not sweep.known(STEP):
            continue
        own = [curve for group in _groups(sweep, key) for curve in _of_group(key, group)]
        found += sorted(own, key=lambda curve: (curve.grows, curve.fit.exact))
        if not own:
            refused.append(
                f"No law can be fitted over {word(key)}: no two completed jobs differ in their number alone, with the "
                f"same global batch or with one in proportion to it. Sweep {key} with at least two values."
            )
    return found, refused


def _groups(sweep: Sweep, key: str) -> list[list[Result]]:
    """Jobs that were given the same but for `key`, the batch, and the seed."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in sweep.known(STEP):
        measured = result.figures[STEP.key] > 0 and result.figures.get(RATE.key, 0) > 0
        if measured and result.number(key) and result.number(BATCH):
            rest = tuple(value for name, value in result.settings.items() if name not in (key, BATCH, SEED))
            groups.setdefault(rest, []).append(result)
    return list(groups.values())


def _of_group(key: str, group: Sequence[Result]) -> list[Curve]:
    fixed: dict[Fraction, list[Result]] = {}
    growing: dict[Fraction, list[Result]] = {}
    for result in group:
        batch, workers = result.number(BATCH) or 0, result.number(key) or 1
        fixed.setdefault(Fraction(batch), []).append(result)
        growing.setdefault(Fraction(batch, workers), []).append(result)
    return [
        _curve(key, grows, batch, own)
        for grows, each in ((False, fixed), (True, growing))
        for batch, own in sorted(each.items())
        if len({result.number(key) for result in own}) > 1
    ]


def _curve(key: str, grows: bool, batch: Fraction, group: Sequence[Result]) -> Curve:
    points = sorted(
        ((r.number(key) or 1, r.figures[STEP.key], r.figures[RATE.key], r) for r in group), key=lambda point: point[:3]
    )
    workers = [point[0] for point in points]
    fit = fit_gustafson(workers, [p[2] for p in points]) if grows else fit_amdahl(workers, [p[1] for p in points])
    settings = group[0].settings
    rest = [f"{word(k)} {v}" for k, v in settings.items() if k not in (key, BATCH, SEED)]
    return Curve(key, ", ".join(rest), grows, batch, tuple(points), fit)


def scaling_rows(curve: Curve) -> list[list[str]]:
    """A line per job: what was measured beside what the law says."""
    rows = [["job", word(curve.key), "step ms", "samples/s", "speed-up", "efficiency", f"{curve.fit.law} says"]]
    for point in curve.points:
        workers, seconds, rate, result = point
        gain = curve.speedup(point)
        rows.append(
            [result.job, str(workers), f"{seconds * 1e3:.1f}", f"{rate:.1f}", f"{gain:.2f}", percent(gain / workers),
             f"{curve.fit.speedup(workers):.2f}"]
        )  # fmt: skip
    return rows
