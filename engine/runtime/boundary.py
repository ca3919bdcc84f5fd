"""What crosses from stage to stage: any nesting of tensors, as one flat message.

    ┌ header ──────────────────────────────────────────────┬ tensor 0 ──┬ tensor 1 ──┬ ...
    │ magic stage mb acknowledged bytes │ present strides… │ 64-aligned │ 64-aligned │
    └──────────────────────────────────────────────────────┴────────────┴────────────┴ ...

One message per action, whatever the nesting: a hop costs one latency. Its size follows from the `MessageSpec` that
both ends hold. The header names what is inside, so that a message out of step is found at once; says which gradients
are absent (an absent gradient is not a gradient of zeros: weight decay would move the parameter); and carries strides,
because an operator's last digits depend on its operands' memory layout. Tensors that are not dense (slices, expanded)
travel contiguous. `acknowledged` counts messages consumed on the opposite channel: the sender may release those.

A received tensor is built over its part of the buffer by `set_`, not as a view: views share one version counter, and
an in-place first layer would then invalidate what its neighbours saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.job import MessageSpec, TensorSpec

_MAGIC = 0x0050_4950_454C_494E
_FIXED = 5
_ALIGN = 64
_NAMES = {kind: str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


class Header(NamedTuple):
    """The part of a header that says which message this is."""

    stage: int
    microbatch: int
    acknowledged: int


def describe(value: Any) -> MessageSpec:
    """The spec of a nesting of (real or fake) tensors and constants."""
    template = pytree.tree_map(_leaf, value)
    return MessageSpec(template, tuple(pytree.tree_leaves(template)))


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        dtype = _NAMES[leaf.dtype]
        return TensorSpec(tuple(leaf.shape), tuple(leaf.stride()), dtype, leaf.requires_grad)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    raise ValueError(
        f"a {type(leaf).__name__} crosses a stage boundary; tensors, numbers, strings, None and nestings of them can"
    )


def shapes(value: Any) -> str:
    """The tensors of a nesting, for messages: `[8, 3] float32, [8] int64`."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors) or repr(value)[:80]


class Layout:
    """Where each tensor of a message lies in its buffer. `nbytes`: the whole message."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self.tensors = tuple(tensors)
        self.dtypes = tuple(getattr(torch, t.dtype) for t in self.tensors)
        self.strides = tuple(dense(t.shape, t.stride) for t in self.tensors)  # where the sender's tensor has those
        words = _FIXED + sum(1 + len(t.shape) for t in self.tensors)
        self.header_bytes = _aligned(8 * words)
        self.at = []
        end = self.header_bytes
        for spec, dtype in zip(self.tensors, self.dtypes, strict=True):
            self.at.append(end)
            end = _aligned(end + torch.Size(spec.shape).numel() * dtype.itemsize)
        self.nbytes = end

    def over(self, buffer: Tensor, index: int, strides: Sequence[int]) -> Tensor:
        """The index-th tensor over its part of a message's buffer, which may itself be a part of something larger."""
        dtype = self.dtypes[index]
        start = (buffer.storage_offset() + self.at[index]) // dtype.itemsize
        whole = torch.empty(0, dtype=dtype, device=buffer.device)
        return whole.set_(buffer.untyped_storage(), start, self.tensors[index].shape, tuple(strides))

    def unpack(self, buffer: Tensor, stage: int, microbatch: int) -> tuple[list[Tensor | None], int]:
        """The tensors over `buffer` (no copy) and the sender's acknowledged count.

        Raises RuntimeError where it is not the message of (stage, microbatch). On a GPU the header is not read (that
        would stop the host until the transfer is done): strides are the layout's, nothing is absent or acknowledged.
        """
        if buffer.device.type != "cpu":
            return [self.over(buffer, i, strides) for i, strides in enumerate(self.strides)], 0
        words = _header_of(buffer, self.header_bytes).tolist()
        if words[0] != _MAGIC or words[4] != self.nbytes or words[1] != stage or words[2] != microbatch:
            raise RuntimeError(
                f"expected stage {stage}, micro-batch {microbatch}, {self.nbytes} bytes, "
                f"received stage {words[1]}, micro-batch {words[2]}, {words[4]} bytes"
            )
        tensors: list[Tensor | None] = []
        at = _FIXED
        for index, spec in enumerate(self.tensors):
            end = at + 1 + len(spec.shape)
            tensors.append(self.over(buffer, index, words[at + 1 : end]) if words[at] else None)
            at = end
        return tensors, words[3]


class Packet:
    """A message to be filled and sent, over and over: its buffer (uint8, `layout.nbytes`), and views of the header and
    of each tensor's place."""

    def __init__(self, layout: Layout, buffer: Tensor) -> None:
        self.layout = layout
        self.buffer = buffer
        self._places = [layout.over(self.buffer, i, strides) for i, strides in enumerate(layout.strides)]
        self._header = _header_of(buffer, layout.header_bytes) if buffer.device.type == "cpu" else None

    def fill(self, tensors: Sequence[Tensor | None], header: Header) -> None:
        """Copy the tensors in and write the header; None: absent (on a GPU, where no header is read: zeros)."""
        words = [_MAGIC, header.stage, header.microbatch, header.acknowledged, self.layout.nbytes]
        for index, tensor in enumerate(tensors):
            place, strides = self._places[index], self.layout.strides[index]
            if tensor is None:
                place.zero_()
            elif self._header is None or tensor.stride() == strides:
                place.copy_(tensor)
            else:
                strides = dense(tensor.shape, tensor.stride())
                self.layout.over(self.buffer, index, strides).copy_(tensor)
            words.append(tensor is not None)
            words.extend(strides)
        if self._header is not None:
            self._header[: len(words)] = words


def _header_of(buffer: Tensor, nbytes: int) -> npt.NDArray[np.int64]:
    """The header of a message as words, over the same memory."""
    return buffer.numpy()[:nbytes].view(np.int64)


class Message:
    """What a stage hands on for micro-batches of one size: its spec, and the layouts of both directions.

    Back travel the gradients of those tensors that require grad, in order.
    """

    def __init__(self, spec: MessageSpec) -> None:
        self.spec = spec
        self.tree = pytree.tree_structure(spec.template)
        self._single = isinstance(spec.template, TensorSpec)  # by far the most frequent: needs no tree
        self.forward = Layout(spec.tensors)
        self.backward = Layout([t for t in spec.tensors if t.requires_grad])

    def mismatch(self, value: Any) -> str | None:
        """How a nesting differs (structure, shape, dtype, grad, constants), or None. Strides may differ."""
        if self._single and isinstance(value, Tensor):
            difference = _difference(value, self.spec.leaves[0])
            return difference and f"position 0: {difference}"
        leaves, tree = pytree.tree_flatten(value)
        if tree != self.tree:
            return f"structure {tree} instead of {self.tree}"
        for index, (leaf, want) in enumerate(zip(leaves, self.spec.leaves, strict=True)):
            if difference := _difference(leaf, want):
                return f"position {index}: {difference}"
        return None

    def enter(self, tensors: Sequence[Tensor | None], anchor: Tensor) -> tuple[Any, list[Tensor | None]]:
        """A received message as the input of a stage, and the box into which backward puts its gradients.

        `anchor` is any tensor that requires grad. The box has one entry per tensor that requires grad.
        """
        box: list[Tensor | None] = []
        leaves: list[Any] = []
        arrived = iter(tensors)
        for leaf in self.spec.leaves:
            if not isinstance(leaf, TensorSpec):
                leaves.append(leaf)
                continue
            tensor = next(arrived)
            assert tensor is not None
            if leaf.requires_grad and torch.is_grad_enabled():
                box.append(None)
                leaves.append(_Gate.apply(anchor, tensor, box, len(box) - 1))
            else:
                leaves.append(tensor)
        return leaves[0] if self._single else pytree.tree_unflatten(leaves, self.tree), box


def _difference(leaf: Any, want: Any) -> str | None:
    if not isinstance(want, TensorSpec):
        return f"{leaf!r} instead of {want!r}" if isinstance(leaf, Tensor) or leaf != want else None
    if not isinstance(leaf, Tensor):
        return f"{leaf!r} instead of a tensor {list(want.shape)} {want.dtype}"
    dtype = _NAMES[leaf.dtype]
    if leaf.shape != want.shape or dtype != want.dtype:
        return f"{list(leaf.shape)} {dtype} instead of {list(want.shape)} {want.dtype}"
    if leaf.requires_grad != want.requires_grad:
        return f"requires_grad {leaf.requires_grad} instead of {want.requires_grad}"
    return None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """`stride` where the elements of such a tensor fill a block of memory once each, else those of a contiguous one."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if step != expected:
            return tuple(torch.empty(shape, device="meta").stride())
        expected *= size
    return tuple(stride)


class _Gate(torch.autograd.Function):
    """Lets a received tensor into a stage's graph as a non-leaf, and catches its gradient on the way back.

    A leaf that requires grad may not be changed in place, nor may a view of one; this output may. The gradient is put
    into `box`; an entry that stays None is absent.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, box: list[Tensor | None], index: int) -> Tensor:
        ctx.box, ctx.index = box, index
        return alias(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.box[ctx.index] = grad
        return None, None, None, None


def alias(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory that is no view of the first: it has a version counter of its own."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a nesting, in the order of its spec."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_flatten(value)[0] if isinstance(leaf, Tensor)]
