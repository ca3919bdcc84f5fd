"""What of a bucket's parameters an owner updates, where not everybody updates everything.

    a bucket      [ head | weight 0 ........ | pad | weight 1 ... ]
    owned                     [first ............... last)              pieces: the end of weight 0, the start of 1

A piece is a parameter of its own on the owner's memory, and what an optimizer is given. Where every element is updated
by itself, a piece is flat; an owner of everything gets parameters in their own shapes, for any optimizer.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from engine.gradients.layout import Bucket


class ShardParameter(NamedTuple):
    """The part of parameter `number` (of the reducer's `named`) that an owner updates.

    `flat`: elements from `first` on in the order of memory; else the whole parameter, in its own shape.
    """

    number: int
    parameter: nn.Parameter
    first: int = 0
    flat: bool = False


class Owned(NamedTuple):
    """A shard parameter, its parameter's place in the bucket, and the elements of the owned part that it covers."""

    place: int
    piece: ShardParameter
    first: int
    last: int

    def gradient(self, part: Tensor) -> Tensor:
        """Return the gradient in a flat tensor of the owned part, laid out as the parameter is."""
        parameter = self.piece.parameter
        return part.as_strided(parameter.size(), parameter.stride(), part.storage_offset() + self.first)


def owned(bucket: Bucket, span: tuple[int, int], values: Tensor, numbers: dict[int, int], flat: bool) -> list[Owned]:
    """Return the shard parameters of a bucket whose elements `span` lie in the flat tensor `values`.

    `numbers`: number of a parameter, by its id. `flat`: whether parameters may be cut, and lose their shape.
    """
    found = []
    views = bucket.views(values, span[0]) if span[0] < span[1] and not flat else []
    for place, ((_, parameter), offset) in enumerate(zip(bucket.named, bucket.offsets, strict=True)):
        begin, end = max(span[0], offset), min(span[1], offset + parameter.numel())
        if begin >= end:
            continue
        own = values[begin - span[0] : end - span[0]] if flat else views[place]
        piece = ShardParameter(numbers[id(parameter)], nn.Parameter(own), begin - offset if flat else 0, flat)
        found.append(Owned(place, piece, begin - span[0], end - span[0]))
    return found


def move_into(bucket: Bucket, values: Tensor) -> None:
    """Move a bucket's parameters into the flat tensor `values`."""
    for (_, parameter), view in zip(bucket.named, bucket.views(values), strict=True):
        view.copy_(parameter.detach())
        parameter.data = view
