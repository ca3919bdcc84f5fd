"""What crosses from stage to stage: any nesting of tensors, as one flat message.

    ┌ header ──────────────────────────────────────────────┬ tensor 0 ──┬ tensor 1 ──┬ ...
    │ magic stage mb acknowledged bytes │ present strides… │ 64-aligned │ 64-aligned │
    └──────────────────────────────────────────────────────┴────────────┴────────────┴ ...

One message per action, whatever the nesting: a hop costs one latency. Its size follows from the `MessageSpec` that
both ends hold. The header names what is inside, so that a message out of step is found at once; says which gradients
are absent (an absent gradient is not a gradient of zeros: weight decay would move the parameter); and carries strides,
because an operator's last digits depend on its operands' memory layout. Tensors that are not dense (slices, expanded)
travel as their `clone()` would lie. `acknowledged` counts messages consumed on the opposite channel: the sender may
release those.

A received tensor is built over its part of the buffer by `set_`, not as a view: views share one version counter, and
an in-place first layer would then invalidate what its neighbours saved.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.errors import a_type, printable
from engine.job import MessageSpec, TensorSpec
from engine.pipeline.messages.nesting import LEAF, form_of, template

_MAGIC = 0x0050_4950_454C_494E
_HEAD = struct.Struct("=5q")  # magic, then what `Header` names, then the bytes of the whole message
_WHICH = struct.Struct("=3q")
_MAGIC_BYTES = 8
_ALIGN = 64
_NAMES = {kind: str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


class Header(NamedTuple):
    """The part of a header that says which message this is."""

    stage: int
    microbatch: int
    acknowledged: int


class Difference(NamedTuple):
    """How an output differs from what its receiver expects, and what to do about it; each in one line."""

    what: str
    advice: str

    def __str__(self) -> str:
        return self.what


_ADVICE = {
    "structure": "The nesting must be the same in every step: return a fixed tuple or dictionary, and what is left out "
    "as a tensor of zeros",
    "constant": "Numbers, strings and None that cross a stage boundary must be the same in every step: hand on what "
    "varies as a tensor",
    "shape": "Shapes that vary between steps are not supported: pad the samples to one shape",
    "dtype": "The dtype must be the same in every step: convert the layer's output to one",
    "grad": "Whether an output requires grad must be the same in every step: freeze layers before training starts, and "
    "detach an output always or never",
}


def _outline(value: Any) -> str:
    """A nesting in one line: `(tensor, {'mask': tensor})`."""
    if isinstance(value, Tensor | TensorSpec):
        return "tensor"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_outline(part)}" for key, part in value.items()) + "}"
    if type(value) is tuple:
        return "(" + ", ".join(map(_outline, value)) + ("," if len(value) == 1 else "") + ")"
    if type(value) is list:
        return "[" + ", ".join(map(_outline, value)) + "]"
    return printable(" ".join(repr(value).split()), 80) if _is_constant(value) else type(value).__name__


def describe(value: Any) -> MessageSpec:
    """The spec of a nesting of (real or fake) tensors and constants."""
    return MessageSpec(form_of(value), tuple(map(_leaf, pytree.tree_leaves(value))))


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        dtype = _NAMES[leaf.dtype]
        return TensorSpec(tuple(leaf.shape), tuple(leaf.stride()), dtype, leaf.requires_grad)
    if _is_constant(leaf):
        return leaf
    raise ValueError(
        f"{a_type(leaf)} crosses a stage boundary; tensors, numbers, strings, None and nestings of them can"
    )


def _is_constant(leaf: Any) -> bool:
    return leaf is None or type(leaf) in (bool, int, float, str)


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
        self.usual = tuple(word for strides in self.strides for word in (1, *strides))  # what a header says of them
        self.words = struct.Struct(f"={len(self.usual)}q")
        self.at = []
        end = _aligned(_HEAD.size + self.words.size)
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

    def places(self, buffer: Tensor) -> list[Tensor]:
        """All tensors over a message's buffer, with the layout's strides."""
        return [self.over(buffer, i, strides) for i, strides in enumerate(self.strides)]


class SendBuffer:
    """The memory (uint8, `layout.nbytes`) of messages of one layout that are sent one after another.

    It holds views of the header and of each tensor's place. What a header says in every message stays in it.
    """

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        self.layout = layout
        self.memory = memory
        self._places = layout.places(memory)
        self._header = _bytes_of(memory)
        if self._header is not None:
            _HEAD.pack_into(self._header, 0, _MAGIC, 0, 0, 0, layout.nbytes)
        self._usual = False  # whether the header says that all is there, with the layout's strides

    def fill(self, tensors: Sequence[Tensor | None], header: Header) -> None:
        """Copy the tensors in and write the header; None: absent (on a GPU, where no header is read: zeros)."""
        layout, usual = self.layout, True
        for place, tensor, strides in zip(self._places, tensors, layout.strides, strict=True):
            if tensor is not None and tensor.stride() == strides:
                place.copy_(tensor)
            else:
                usual = False
        if self._header is None:
            self._fill_unread(tensors)
            return
        if not usual:
            layout.words.pack_into(self._header, _HEAD.size, *self._fill_unusual(tensors))
        elif not self._usual:
            layout.words.pack_into(self._header, _HEAD.size, *layout.usual)
        self._usual = usual
        _WHICH.pack_into(self._header, _MAGIC_BYTES, *header)

    def _fill_unusual(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """The tensors that are absent or laid out otherwise; what the header says of all."""
        words: list[int] = []
        for index, tensor in enumerate(tensors):
            strides = self.layout.strides[index]
            if tensor is None:
                self._places[index].zero_()
            elif tensor.stride() != strides:
                strides = dense(tensor.shape, tensor.stride())
                self.layout.over(self.memory, index, strides).copy_(tensor)
            words += [tensor is not None, *strides]
        return words

    def _fill_unread(self, tensors: Sequence[Tensor | None]) -> None:
        """The same where the other side takes everything as laid out as usual."""
        for place, tensor, strides in zip(self._places, tensors, self.layout.strides, strict=True):
            if tensor is None:
                place.zero_()
            elif tensor.stride() != strides:
                place.copy_(tensor)


class ReceiveBuffer:
    """The memory (uint8, `layout.nbytes`) of one message that is received, and its tensors over that memory."""

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        self.layout = layout
        self.memory = memory
        self._tensors = layout.places(memory)
        self._header = _bytes_of(memory)

    def open(self, stage: int, microbatch: int) -> tuple[list[Tensor | None], int]:
        """The tensors over the buffer (no copy) and the sender's acknowledged count.

        Raises RuntimeError where it is not the message of (stage, microbatch). On a GPU the header is not read (that
        would stop the host until the transfer is done): strides are the layout's, nothing is absent or acknowledged.
        """
        tensors: list[Tensor | None] = list(self._tensors)
        if self._header is None:
            return tensors, 0
        layout = self.layout
        magic, of_stage, of_microbatch, acknowledged, nbytes = _HEAD.unpack_from(self._header)
        if magic != _MAGIC or nbytes != layout.nbytes or of_stage != stage or of_microbatch != microbatch:
            raise RuntimeError(
                f"expected stage {stage}, micro-batch {microbatch}, {layout.nbytes} bytes, "
                f"received stage {of_stage}, micro-batch {of_microbatch}, {nbytes} bytes"
            )
        words = layout.words.unpack_from(self._header, _HEAD.size)
        if words != layout.usual:
            at = 0
            for index, spec in enumerate(layout.tensors):
                end = at + 1 + len(spec.shape)
                tensors[index] = layout.over(self.memory, index, words[at + 1 : end]) if words[at] else None
                at = end
        return tensors, acknowledged


def _bytes_of(buffer: Tensor) -> memoryview | None:
    """The bytes of a message, where its header is read."""
    return buffer.numpy().data if buffer.device.type == "cpu" else None


class Message:
    """What a stage hands on for micro-batches of one size: its spec, and the layouts of both directions.

    Back travel the gradients of those tensors that require grad, in order.
    """

    def __init__(self, spec: MessageSpec) -> None:
        self.spec = spec
        self.tree = pytree.tree_structure(template(spec))
        self._single = spec.form == LEAF and isinstance(
            spec.leaves[0], TensorSpec
        )  # by far the most frequent: needs no tree
        self._first = next(((t.shape, getattr(torch, t.dtype), t.requires_grad) for t in spec.tensors), None)
        self.forward = Layout(spec.tensors)
        self.backward = Layout([t for t in spec.tensors if t.requires_grad])

    def mismatch(self, value: Any) -> Difference | None:
        """How a nesting differs (structure, shape, dtype, grad, constants), or None. Strides may differ."""
        if self._single and isinstance(value, Tensor):
            if (value.shape, value.dtype, value.requires_grad) == self._first:
                return None
            return _difference(value, self.spec.leaves[0])
        leaves, tree = pytree.tree_flatten(value)
        if tree != self.tree:
            found, expected = _outline(value), _outline(template(self.spec))
            return Difference(f"the structure {found} instead of {expected}", _ADVICE["structure"])
        for index, (leaf, want) in enumerate(zip(leaves, self.spec.leaves, strict=True)):
            if difference := _difference(leaf, want):
                return Difference(f"position {index}: {difference.what}", difference.advice)
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


class MessageTable(dict[int, Sequence[Message]]):
    """Samples of a micro-batch -> what each stage hands on for it; `specs(rows)` says so when it is first asked."""

    def __init__(self, specs: Callable[[int], Sequence[MessageSpec]]) -> None:
        super().__init__()
        self.specs = specs

    def __missing__(self, rows: int) -> Sequence[Message]:
        self[rows] = [Message(spec) for spec in self.specs(rows)]
        return self[rows]


def _difference(leaf: Any, want: Any) -> Difference | None:
    if not isinstance(want, TensorSpec):
        if _same_constant(leaf, want):
            return None
        return Difference(f"{_outline(leaf)} instead of {_outline(want)}", _ADVICE["constant"])
    expected = f"{list(want.shape)} {want.dtype}"
    if not isinstance(leaf, Tensor):
        return Difference(f"{_outline(leaf)} instead of a tensor {expected}", _ADVICE["structure"])
    dtype = _NAMES[leaf.dtype]
    if leaf.shape != want.shape or dtype != want.dtype:
        advice = _ADVICE["dtype" if leaf.shape == want.shape else "shape"]
        return Difference(f"{list(leaf.shape)} {dtype} instead of {expected}", advice)
    if leaf.requires_grad != want.requires_grad:
        return Difference(f"requires_grad {leaf.requires_grad} instead of {want.requires_grad}", _ADVICE["grad"])
    return None


def _same_constant(leaf: Any, want: Any) -> bool:
    """The type counts, as the receiver is given `want`: 1 is neither 1.0 nor True. NaN is NaN."""
    return type(leaf) is type(want) and (leaf == want or (leaf != leaf and want != want))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides that a tensor of this shape and stride has after it has crossed a boundary.

    They are its own where its elements fill a block of memory once each, else those of its `clone()`: what crosses is
    laid out as what one stage hands to the next on the same rank.
    """
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if step != expected:
            return tuple(torch.empty_strided(shape, stride, device="meta").clone().stride())
        expected *= size
    return tuple(stride)


class _Gate(torch.autograd.Function):
    """Lets a received tensor into a stage's graph as a non-leaf, and catches its gradient on the way back.

    A leaf that requires grad may not be changed in place, nor may a view of one; this output may. The gradient is put
    into `box`; an entry that stays None is absent.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, box: list[Tensor | None], index: int) -> Tensor:
        ctx.set_materialize_grads(False)  # what an operator behind it gives no gradient is absent, not zero
        ctx.box, ctx.index = box, index
        return alias(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None, None]:
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
