"""Gradients in half precision on the wire, without losing what rounding takes away and without overflowing.

    to send     gradient + residual, scaled by a power of two, rounded to the wire's dtype
    residual    what the rounding lost; it is added to the next step's gradient (error feedback: Seide et al. 2014,
                Interspeech; Karimireddy et al. 2019, arXiv 1901.09847)
    scale       2^k, the same on all members, such that the sum of N values of the largest magnitude stays in range

So no finite gradient becomes infinite on the way, and small ones do not vanish below fp16's smallest number, whatever
loss scale the training uses. A gradient that is infinite or NaN already stays so on every member, for a loss scaler to
see; the residual is then forgotten, because the scaler will change the scale that it is measured in.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

LARGEST = 15  # the sum stays below 2^15: half of what fp16 holds is left for rounding upwards on the way
SMALLEST = -100  # magnitudes below 2^-100 are not scaled up further: fp32 could not hold the scale


class Compression(Enum):
    """How gradients travel: as they are, or in half precision."""

    none = None
    fp16 = torch.float16
    bf16 = torch.bfloat16

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype on the wire; None where gradients travel as they are."""
        return self.value


def scale_for(largest: float, members: int) -> float | None:
    """Return the power of two to scale by before rounding; None where a gradient is not finite."""
    if not math.isfinite(largest):
        return None
    _, exponent = math.frexp(largest * members)
    return math.ldexp(1.0, LARGEST - max(exponent, SMALLEST)) if largest else 1.0


class Feedback:
    """Rounding errors of one bucket, kept to be added to its next gradients."""

    def __init__(self, like: Tensor, wire: torch.dtype) -> None:
        self._residual = torch.zeros_like(like)
        self._wire = torch.empty_like(like, dtype=wire)

    def add_to(self, data: Tensor) -> None:
        """Add what earlier rounding has taken away to `data`, in place."""
        data.add_(self._residual)

    def rounded(self, data: Tensor, scale: float | None) -> Tensor:
        """Return `data` as it goes on the wire and keep what is lost; the buffer is used again by the next call."""
        if scale is None:
            self._residual.zero_()
            return self._wire.copy_(data)
        self._wire.copy_(data.mul(scale))
        torch.sub(data, self._wire.to(data.dtype).div_(scale), out=self._residual)
        return self._wire
