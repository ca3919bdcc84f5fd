"""Amdahl's and Gustafson's laws, fitted to measured times: what part of the work does not get faster with more workers.

    s: the serial fraction, n: workers

    Amdahl      S(n) = 1 / (s + (1-s)/n)    the problem stays the same; never more than 1/s
    Gustafson   S(n) = s + (1-s) n          the problem grows with n; every further worker adds 1-s of one

(G. Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", AFIPS 1967;
J. Gustafson, "Reevaluating Amdahl's law", CACM 31(5), 1988.) In Gustafson's law s is a share of the time that one
worker takes for the problem of one, as in Amdahl's; with one worker the two agree.

Both are straight lines in the right quantity (time over 1/n; samples per second over n), so the fit is linear least
squares, of relative deviations, because a short time is measured as well as a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def amdahl(serial: float, workers: float) -> float:
    """The speed-up of a problem that stays the same."""
    return 1 / (serial + (1 - serial) / workers)


def gustafson(serial: float, workers: float) -> float:
    """The speed-up of a problem that grows with the workers: work done per time, over that of one worker."""
    return serial + (1 - serial) * workers


@dataclass(frozen=True)
class Fit:
    """A law of scaling, fitted to measurements.

    `serial`: s, within 0..1. `one`: what was fitted (seconds, or samples per second), at one worker. `deviation`: the
    root of the mean squared relative deviation. `exact`: two sizes, so that any two times would fit.
    """

    law: str
    serial: float
    one: float
    deviation: float
    exact: bool

    @property
    def limit(self) -> float | None:
        """The speed-up that no number of workers exceeds; None where there is none."""
        if self.law == "Gustafson":
            return None if self.serial < 1 else 1.0
        return 1 / self.serial if self.serial > 0 else None

    def speedup(self, workers: float) -> float:
        """The speed-up that the law gives for so many workers, over one."""
        return (amdahl if self.law == "Amdahl" else gustafson)(self.serial, workers)


def fit_amdahl(workers: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Amdahl's law for the `seconds` that the same work took with each number of workers.

    Raises ValueError for fewer than two different numbers of workers, and for what is not positive.
    """
    return _fit("Amdahl", workers, seconds, lambda n: 1 / n)


def fit_gustafson(workers: Sequence[int], rates: Sequence[float]) -> Fit:
    """Gustafson's law for the `rates`, work per second, with work in proportion to the workers. Raises as above."""
    return _fit("Gustafson", workers, rates, float)


def _fit(law: str, workers: Sequence[int], values: Sequence[float], of: Callable[[int], float]) -> Fit:
    """Fit values = a + b of(n), neither a nor b negative; then s = a / (a + b)."""
    sizes = len(set(workers))
    if sizes < 2:
        found = ", ".join(map(str, sorted(set(workers)))) or "none"
        raise ValueError(f"{law}'s law needs at least two different numbers of workers to be fitted, found {found}")
    if min(workers) < 1 or min(values) <= 0:
        raise ValueError(f"{law}'s law needs at least one worker and positive measurements, not {list(values)}")
    parts = [(1 / y, of(n) / y) for n, y in zip(workers, values, strict=True)]  # each should add up to 1
    a, b = _non_negative(parts)
    deviation = (sum((a * p + b * q - 1) ** 2 for p, q in parts) / len(parts)) ** 0.5
    return Fit(law, a / (a + b), a + b, deviation, sizes == 2)


def _non_negative(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b), neither below 0, with the least sum of (a p + b q - 1)^2."""
    pp, pq, qq = (sum(f * g for f, g in pairs) for pairs in (
        [(p, p) for p, _ in parts], [(p, q) for p, q in parts], [(q, q) for _, q in parts],
    ))  # fmt: skip
    p1, q1 = sum(p for p, _ in parts), sum(q for _, q in parts)
    determinant = pp * qq - pq * pq
    a, b = (p1 * qq - q1 * pq) / determinant, (q1 * pp - p1 * pq) / determinant
    if a < 0:
        return 0.0, q1 / qq
    return (a, b) if b >= 0 else (p1 / pp, 0.0)
