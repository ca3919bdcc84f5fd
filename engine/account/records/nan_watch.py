"""A loss that is not a finite number, told once, with the step in which it began.

From then on every weight is lost as a rule, whatever the rest of the run costs. The run goes on all the same, as a
plain training loop would, unless `train.stop_on_nan` asks for the end.
"""

from __future__ import annotations

import math

from engine.account.records.gather import Step


class LossNotFiniteError(Exception):
    """The loss of a step is NaN or infinite, and the run is to end there."""


class LossWatch:
    """Warns of the first loss that is not finite, or ends the run there.

    `began`: the first step (counted from 0) whose loss was not finite; None while there is none.
    """

    def __init__(self, stop: bool) -> None:
        self.began: int | None = None
        self._stop = stop

    def look(self, step: Step) -> str | None:
        """The warning at the first step whose loss is not finite, else None. Raises LossNotFiniteError if asked."""
        if self.began is not None or step.loss is None or math.isfinite(step.loss):
            return None
        self.began = step.index
        found = f"the loss of step {step.index} (counted from 0) is {step.loss}"
        remedy = "a lower optimizer.lr, train.clip_norm, precision=fp32 or a look at the data may help"
        if self._stop:
            raise LossNotFiniteError(f"{found}, and train.stop_on_nan ends the run: {remedy}")
        return f"{found}; the run goes on, but what it learned is lost: {remedy}. train.stop_on_nan=true ends it there"
