"""How two tensors become one: sum, mean, minimum, maximum, product, and what each is defined for.

    sum, product   floating, complex and whole numbers; whole numbers wrap around
    mean           floating and complex; the mean of whole numbers would not be one
    min, max       real numbers, which also covers bool (all, any); NaN wins

Half precision is computed in fp32 and rounded to the wire's dtype at each hop. A mean is a sum divided once, at the
end, by whoever holds it. The sum of a half-precision mean stays in fp32 until then, also on the wire, and its parts are
scaled down by a power of two: the mean of equal values is that value, from the smallest subnormal to the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

HALF = frozenset({torch.float16, torch.bfloat16})
SUMMABLE = _FLOATING | _COMPLEX | _WHOLE  # bool is left out: its sum is a question of taste


class ReduceOp(Enum):
    """An associative operation, by the name that messages use."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    def refusal(self, dtype: torch.dtype) -> str | None:
        """Say why tensors of `dtype` have no such result; None where they have."""
        allowed = _DEFINED[self]
        if dtype in allowed:
            return None
        names = sorted(str(each).removeprefix("torch.") for each in allowed)
        return f"no {self.value} of {dtype} is defined; use one of {names}"

    def combine(self, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Write first (op) second into `out`, elementwise; `out` may be either of them."""
        _COMBINE[self](first, second, out=out)

    def prepare(self, part: Tensor, size: int) -> Tensor:
        """Return what is combined for one of `size` parts: the part, or an fp32 copy for a mean in half precision."""
        if self is ReduceOp.MEAN and part.dtype in HALF:
            return part.float().mul_(mean_scale(size))
        return part

    def finish(self, combined: Tensor, size: int, dtype: torch.dtype) -> None:
        """Apply what the combination of `size` prepared parts of `dtype` still needs, in place."""
        if self is ReduceOp.MEAN:
            combined.div_(size * mean_scale(size) if dtype in HALF else size)


def mean_scale(size: int) -> float:
    """Return the largest power of two by which `size` finite half-precision numbers add up within fp32's range.

    bf16 reaches as far as fp32. Scaled so, its numbers are still exact: fp32 has 16 more bits below its smallest one.
    """
    return 2.0 ** -(size - 1).bit_length()


def combine_means(first: Tensor, second: Tensor, count: int, own: int, out: Tensor) -> None:
    """Write the mean over `count` parts with mean `first` and `own` parts with mean `second` into `out`.

    Half precision is computed in fp32 and rounded once: from equal values comes that value. Nothing from no parts.
    """
    out.copy_((first.float() * count + second.float() * own) / max(1, count + own))


def word(op: object) -> str:
    """Name an operation in messages, whatever was given for one."""
    return op.value if isinstance(op, ReduceOp) else repr(op)


def refusal(op: object, dtype: torch.dtype) -> str | None:
    """Say why there is no such result, also for an `op` that is no `ReduceOp`, like torch.distributed's own."""
    if isinstance(op, ReduceOp):
        return op.refusal(dtype)
    names = ", ".join(f"ReduceOp.{each.name}" for each in ReduceOp)
    return f"op={op!r} is none of engine.collectives' {names}"


_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
_DEFINED = {
    ReduceOp.SUM: SUMMABLE,
    ReduceOp.MEAN: _FLOATING | _COMPLEX,
    ReduceOp.MIN: _FLOATING | _WHOLE | {torch.bool},
    ReduceOp.MAX: _FLOATING | _WHOLE | {torch.bool},
    ReduceOp.PRODUCT: SUMMABLE,
}
