"""Whether a loss adds up over samples: one batch taken whole, and the same batch in parts.

A pipeline trains on the sum of its micro-batches' losses. That is the loss of the batch for a mean or a sum over
samples, and another one for what compares the samples of a batch (contrastive losses) or takes its statistics.

Tried are copies of the loss, in evaluation mode: a state that training moves stays as it is, and a dropout inside
draws nothing. The targets come from all over the data set. The outputs are made up, in float64 where the loss takes
it, and of two kinds: probabilities, and numbers of any size, since neither shows every difference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from engine.errors import message_of, refusing, said
from engine.job import MessageSpec
from engine.pipeline.batches.microbatch import take
from engine.pipeline.dtypes import to_device
from engine.pipeline.inspection.fake_model import OperatorLog
from engine.pipeline.losses import Loss, stand_in
from engine.pipeline.messages.boundary import describe
from engine.training.samples.source import pair

TRIED_ROWS = 4  # half of the samples that are tried
# Some losses compute in float32, or in less, whatever they are given: what they return tells how exact they are.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


_Kind = Callable[[torch.Size, torch.Generator], Tensor]


class Additivity(NamedTuple):
    """What was found: two figures that differ, or why nothing could be told; neither where the loss adds up."""

    at_once: float = 0.0
    in_parts: float = 0.0
    differs: bool = False
    untold: str | None = None


class _UntoldError(Exception):
    """The loss cannot be judged by these outputs; the message says why."""


def adds_up(loss: Loss, one: MessageSpec, whole: MessageSpec, data: Any, rows: int, dtype: torch.dtype) -> Additivity:
    """Try the loss on `2 * rows` samples of `data`.

    `one` and `whole` are the model's outputs for `rows` and for twice as many samples: where they differ is the
    dimension of the samples. `dtype` is that of the run, for a loss that does not take float64.
    """
    total = 2 * rows
    try:
        with refusing(said):
            # In no order: a data set may be sorted, and its first items all alike.
            items = [pair(data[i])[1] for i in random.Random(0).sample(range(len(data)), total)]
            dims = _batch_dimensions(one, whole, rows)
    except ValueError as error:
        return Additivity(untold=message_of(error))
    reasons = []
    for kind in (_probabilities, _numbers):
        found = _tried(loss, whole, kind, dims, items, dtype)
        if found.differs:
            return found
        reasons.append(found.untold)
    return Additivity(untold=reasons[0]) if all(reasons) else Additivity()


def _tried(
    loss: Loss, whole: MessageSpec, kind: _Kind, dims: Sequence[int], items: Sequence[Any], dtype: torch.dtype
) -> Additivity:
    """What one kind of outputs shows, in the first precision that the loss takes."""
    untold = None
    for precision in dict.fromkeys((torch.float64, dtype)):
        target = to_device(default_collate(list(items)), torch.device("cpu"), precision)
        try:
            return _compared(loss, _made_up(whole, kind, precision), dims, target, len(items), precision)
        except _UntoldError as error:
            untold = untold or str(error)
    return Additivity(untold=untold)


def _compared(
    loss: Loss, output: Any, dims: Sequence[int], target: Any, total: int, precision: torch.dtype
) -> Additivity:
    whole_sum, whole_count, exactness = _summed(loss, output, target)
    if not whole_count or not math.isfinite(whole_sum):
        raise _UntoldError("it gives no finite number for made-up outputs")
    if _summed(loss, output, target)[:2] != (whole_sum, whole_count):
        raise _UntoldError("it gives another number each time for the same samples")
    at_once, tolerance = whole_sum / whole_count, max(_TOLERANCE[precision], exactness)
    for sizes in _partitions(total):
        try:
            parts = [
                _summed(loss, _narrowed(output, dims, start, n), take(target, start, n, total))
                for start, n in _starts(sizes)
            ]
        except _UntoldError:  # too few samples for it, as they would be in training
            continue
        count = sum(part[1] for part in parts)
        in_parts = sum(part[0] for part in parts) / count if count else math.nan
        scale = abs(at_once) + sum(abs(part[0]) for part in parts) / (count or 1)
        # A part that is not finite where the whole is: a mean over nothing, which the whole does not have.
        if not math.isfinite(in_parts) or abs(at_once - in_parts) > tolerance * scale:
            return Additivity(at_once, in_parts, True)
    return Additivity()


def _partitions(total: int) -> list[tuple[int, ...]]:
    """Unlike parts, halves, and many; parts of one sample only for want of more."""
    small = max(total // 3, min(2, total // 2))
    found = [(total - small, small), (total // 2, total - total // 2)]
    return list(dict.fromkeys([*found, (2,) * (total // 2)] if total % 2 == 0 and total > 2 else found))


def _starts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, size
        start += size


def _summed(loss: Loss, output: Any, target: Any) -> tuple[float, float, float]:
    """(sum, count) of what a copy of the loss is given, in evaluation mode, and how exact that is."""
    asked = loss.apart(training=False)
    given = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output)
    try:
        with refusing(said), torch.no_grad(), OperatorLog() as watch:
            found = asked(given, target)
            result = float(found), float(asked.count(target, describe(output))), _TOLERANCE.get(found.dtype, 0.0)
    except ValueError as error:
        raise _UntoldError(f"it fails on made-up outputs ({message_of(error)})") from error
    if watch.drawn:
        raise _UntoldError("it draws random numbers")
    return result


def _probabilities(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Numbers between 0 and 1 that add up to 1 over the last dimension, and differ everywhere."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn.softmax(-1) if shape[-1:] > (1,) else drawn.sigmoid()


def _numbers(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return 2 * torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5


def _made_up(output: MessageSpec, kind: _Kind, precision: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_complex():
            wide = torch.complex128 if precision is torch.float64 else leaf.dtype
            return torch.complex(kind(leaf.shape, generator), kind(leaf.shape, generator)).to(wide)
        return kind(leaf.shape, generator).to(precision) if leaf.is_floating_point() else leaf

    return pytree.tree_map(make, stand_in(output, torch.device("cpu")))


def _batch_dimensions(one: MessageSpec, whole: MessageSpec, rows: int) -> list[int]:
    """For each tensor of the output, which of its dimensions grows with the samples. ValueError where none does."""
    found = []
    for small, large in zip(one.tensors, whole.tensors, strict=True):
        grown = [i for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b]
        if len(grown) != 1 or large.shape[grown[0]] != 2 * rows:
            raise ValueError("the model's output is not made of one part per sample")
        found.append(grown[0])
    return found


def _narrowed(output: Any, dims: Sequence[int], start: int, rows: int) -> Any:
    leaves, nesting = pytree.tree_flatten(output)
    dim = iter(dims)
    cut = [x.narrow(next(dim), start, rows).contiguous() if isinstance(x, Tensor) else x for x in leaves]
    return pytree.tree_unflatten(cut, nesting)
