"""What `objective=` can name: the figure of a finished job that a sweeper optimizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Objective(NamedTuple):
    """Where a figure stands: dotted paths in summary.json and, where mode=plan knows it, in plan.json."""

    trained: str
    planned: str | None = None
    higher: bool = False  # whether more of it is better

    @property
    def worst(self) -> float:
        """The value of a job that has none."""
        return -math.inf if self.higher else math.inf

    def of(self, content: Mapping[str, Any], planned: bool = False) -> float | None:
        """The figure in the content of summary.json or plan.json; None where it is not there."""
        value: Any = content
        for name in ((self.planned or "") if planned else self.trained).split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        known = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        return float(value) if known else None


OBJECTIVES: dict[str, Objective] = {
    "loss": Objective("loss.last"),
    "eval_loss": Objective("evaluation.loss"),
    "accuracy": Objective("evaluation.accuracy", higher=True),
    "samples_per_s": Objective("samples_per_second", higher=True),
    "step_time": Objective("step_time.median", "makespan"),
    "bubble": Objective("bubble.measured", "bubble_fraction"),
}
EVALUATED = ("eval_loss", "accuracy")  # those that only an evaluation gives


def value(name: str | None, content: Mapping[str, Any], planned: bool = False) -> float:
    """The figure called `name`; of a job that did not complete, and where there is none, the worst there is."""
    usual = ("bubble",) if planned else ("eval_loss", "loss")
    names = usual if name is None else (name,)
    found = [OBJECTIVES[each].of(content, planned) for each in names if planned or content.get("status") == "completed"]
    return next((each for each in found if each is not None), OBJECTIVES[names[0]].worst)
