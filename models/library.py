"""What models of a library give, and how it is scored: an object or a dictionary that holds `logits`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor


class LogitsLoss:
    """Cross entropy of an output's `logits` [N, ..., C] and classes [N, ...], as (sum, number of those not ignored)."""

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, int]:
        """Return the sum of losses, and the number of targets that it is over."""
        logits = output["logits"] if isinstance(output, Mapping) else output.logits
        flat = logits.flatten(0, -2), target.flatten()
        return F.cross_entropy(*flat, ignore_index=self.ignore_index, reduction="sum"), self.count(target)

    def count(self, target: Tensor) -> int:
        """Return the number of targets that are not `ignore_index`."""
        return int((target != self.ignore_index).sum())
