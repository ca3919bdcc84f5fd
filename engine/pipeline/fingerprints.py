"""Whether all ranks were given the same weights: a number per layer, and the sum of it over ranks.

Ranks that are threads share torch's generator, so that two of them that seed it and build a model at the same time get
neither the one nor the other's numbers. Nothing else would notice: each trains its own stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from engine.pipeline.layers import GivenLayer

_MODULUS = 2**31 - 1  # sums over a million ranks are exact in float64


def fingerprints(given: Sequence[GivenLayer]) -> Tensor:
    """(layers, 2) in float64 on the CPU: of a layer that was given with its weights its number and 1, else zeros."""
    return torch.tensor([_fingerprint(layer) for layer in given], dtype=torch.float64)


def _fingerprint(layer: GivenLayer) -> tuple[int, int]:
    if layer.made is None:
        return 0, 0
    tensors = [*layer.made.parameters(), *layer.made.buffers()]
    if any(tensor.is_meta or is_lazy(tensor) for tensor in tensors):
        return 0, 0
    total = 0
    for tensor in tensors:
        rows = tensor.detach().contiguous().view(-1).view(torch.uint8)
        words = rows.view(torch.int32) if len(rows) % 4 == 0 and rows.data_ptr() % 4 == 0 else rows
        total = total * 31 + int(words.sum(dtype=torch.int64))
    return total % _MODULUS, 1


def check_equal(given: Sequence[GivenLayer], own: Tensor, sum_over_ranks: Callable[[Tensor], None]) -> None:
    """ValueError on every rank, with the first layer that the ranks were given with different weights."""
    total = own.clone()
    sum_over_ranks(total)
    for layer, (number, has), (numbers, having) in zip(given, own.tolist(), total.tolist(), strict=True):
        if has and number * having != numbers:
            raise ValueError(
                f"layer {layer.name!r} was given to the ranks with different weights: build it alike on all of them. "
                "Ranks that are threads share torch's generator: build the model before they start and give each "
                "rank copy.deepcopy() of it, or give (name, function that builds the layer). Layers of "
                "other ranks' stages may be on the meta device"
            )
