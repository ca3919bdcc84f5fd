"""Costs at sizes that were not measured: a line, fixed + per_unit x size, neither part negative.

Two unknowns need two sizes, and far enough apart: between micro-batches that differ by one sample the noise of a
measurement is larger than what tells the two parts from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TELLING = 1.5  # the least that the largest of several sizes must be of the smallest


@dataclass(frozen=True)
class Line:
    """A cost in seconds at a size in any unit: samples of a micro-batch, bytes of a message."""

    fixed: float
    per_unit: float

    def at(self, size: float) -> float:
        """The fitted cost at a size."""
        return self.fixed + self.per_unit * size

    def ratio(self, size: float, known: float) -> float:
        """How many times the cost at size `known` that at `size` is; 1 where nothing costs anything."""
        return self.at(size) / self.at(known) if self.at(known) > 0 else 1.0


FIXED, PROPORTIONAL = Line(1.0, 0.0), Line(0.0, 1.0)  # the two ends of what a line can be


def telling(sizes: Sequence[float]) -> bool:
    """Whether costs at these sizes tell the fixed part from the part that grows."""
    return bool(sizes) and max(sizes) >= TELLING * min(sizes)


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """The line of least squares through (size, cost), of those without a negative part; None for sizes too near."""
    sizes, costs = np.array(points, dtype=np.float64).reshape(-1, 2).T
    if not telling(sizes.tolist()):
        return None
    slope = float(np.cov(sizes, costs, bias=True)[0, 1] / np.var(sizes))
    fixed = float(costs.mean() - slope * sizes.mean())
    if slope <= 0:
        return Line(float(costs.mean()), 0.0)
    return Line(fixed, slope) if fixed >= 0 else Line(0.0, float((sizes * costs).sum() / (sizes**2).sum()))
