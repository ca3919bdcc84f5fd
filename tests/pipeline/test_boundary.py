"""What crosses a boundary: any nesting, any dtype and layout, exactly; and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.pipeline.messages.boundary import Header, Layout, Message, ReceiveBuffer, SendBuffer, describe, tensors_of

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


def sent(layout: Layout, tensors: Sequence[torch.Tensor | None], header: Header) -> torch.Tensor:
    """The bytes of a message, from a packet that has been used before."""
    around = torch.full((layout.nbytes + 8192,), 7, dtype=torch.uint8)
    memory = around[4096:][: layout.nbytes]  # a packet may lie in the middle of a larger memory
    memory.fill_(255)
    packet = SendBuffer(layout, memory)
    packet.fill([None] * len(tensors), Header(9, 9, 9))
    packet.fill(tensors, header)
    assert (around[:4096] == 7).all() and (around[4096 + layout.nbytes :] == 7).all()
    return packet.memory.clone()


def through(value: object) -> object:
    """Send and receive."""
    spec = describe(value)
    message = Message(replace(spec, form=json.loads(json.dumps(spec.form))))  # as it travels in a job
    layout = message.forward
    buffer = sent(layout, tensors_of(value), Header(3, 4, 5))
    assert buffer.numel() == layout.nbytes
    tensors, acknowledged = ReceiveBuffer(layout, buffer).open(3, 4)
    assert acknowledged == 5
    received, _ = message.enter(tensors, torch.zeros((), requires_grad=True))
    return received


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if shape and draw(st.booleans()):
        tensor = tensor[::2]
    if shape and draw(st.booleans()):
        tensor = tensor.expand(2, *tensor.shape)
    return tensor


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return a == b


leaves = st.one_of(tensors(), st.none(), st.integers(-5, 5), st.booleans(), st.text(max_size=3))
nestings = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(nestings)
def test_any_nesting_arrives_as_it_was(value: object) -> None:
    assert _same(through(value), value)


def test_dense_layouts_keep_their_strides() -> None:
    """The last digits of a product depend on its operands' layout."""
    for tensor in (
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(1, 5).t(),
    ):
        received = through(tensor)
        assert torch.equal(received, tensor)
        assert received.stride() == tensor.stride()
        assert received.data_ptr() % 64 == 0


@given(tensors().filter(lambda tensor: tensor.numel() > 0))
def test_what_crosses_lies_as_a_copy_on_the_same_rank(tensor: torch.Tensor) -> None:
    """So where stages are put does not decide about layouts, and with them about last digits."""
    for each in (tensor, tensor.transpose(0, -1) if tensor.dim() > 1 else tensor, tensor.unsqueeze(-1)):
        assert through(each).stride() == each.clone().stride()


def test_gradients_come_back_and_absent_ones_stay_absent() -> None:
    message = Message(describe((torch.ones(2, requires_grad=True), torch.arange(3), torch.ones(4, requires_grad=True))))
    layout = message.forward
    given = [torch.full((2,), 3.0), torch.arange(3), torch.ones(4)]
    received, _ = ReceiveBuffer(layout, sent(layout, given, Header(0, 0, 0))).open(0, 0)
    (a, ids, _), box = message.enter(received, torch.zeros((), requires_grad=True))
    assert not ids.requires_grad
    (a * a).sum().backward()
    assert box[0].tolist() == [6.0, 6.0]
    assert box[1] is None
    back = message.backward
    gradients, _ = ReceiveBuffer(back, sent(back, box, Header(1, 0, 0))).open(1, 0)
    assert gradients[0].tolist() == [6.0, 6.0]
    assert gradients[1] is None


def test_what_an_operator_gives_no_gradient_is_absent() -> None:
    """It was reached by a backward, but is not a gradient of zeros: that would move weights that decay."""

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grad, None

    message = Message(describe((torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True))))
    (a, b), box = message.enter([torch.ones(2), torch.ones(2)], torch.zeros((), requires_grad=True))
    First.apply(a, b * 2).sum().backward()
    assert box[0].tolist() == [1.0, 1.0]
    assert box[1] is None


def test_an_in_place_first_layer_spoils_nothing() -> None:
    """Two tensors of one message: one is changed in place after the other was saved for backward."""
    message = Message(describe((torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True))))
    layout = message.forward
    tensors, _ = ReceiveBuffer(layout, sent(layout, [torch.ones(2), torch.ones(2)], Header(0, 0, 0))).open(0, 0)
    (a, b), box = message.enter(tensors, torch.zeros((), requires_grad=True))
    saved = b * b
    (a.mul_(3).relu_() + saved).sum().backward()
    assert box[0].tolist() == [3.0, 3.0]
    assert box[1].tolist() == [2.0, 2.0]


def test_a_message_out_of_step_is_found() -> None:
    layout = Message(describe(torch.ones(2))).forward
    buffer = sent(layout, [torch.ones(2)], Header(1, 2, 0))
    with pytest.raises(RuntimeError, match=r"expected stage 1, micro-batch 3.*received stage 1, micro-batch 2"):
        ReceiveBuffer(layout, buffer).open(1, 3)


def test_differences_are_named() -> None:
    message = Message(describe({"h": torch.ones(2, 3), "n": 3}))
    assert message.mismatch({"h": torch.zeros(2, 3), "n": 3}) is None
    assert "[2, 4] float32 instead of [2, 3] float32" in str(message.mismatch({"h": torch.ones(2, 4), "n": 3}))
    assert "float64 instead of" in str(message.mismatch({"h": torch.ones(2, 3).double(), "n": 3}))
    constants = Message(describe((torch.ones(1), math.nan, 1, True)))
    assert constants.mismatch((torch.ones(1), math.nan, 1, True)) is None
    assert "0.5 instead of nan" in str(constants.mismatch((torch.ones(1), 0.5, 1, True)))
    assert "nan instead of 1" in str(constants.mismatch((torch.ones(1), math.nan, math.nan, True)))
    assert "1.0 instead of 1" in str(constants.mismatch((torch.ones(1), math.nan, 1.0, True)))
    assert "1 instead of True" in str(constants.mismatch((torch.ones(1), math.nan, 1, 1)))
    assert "4 instead of 3" in str(message.mismatch({"h": torch.ones(2, 3), "n": 4}))
    assert "structure" in str(message.mismatch([torch.ones(2, 3), 3]))
    assert "requires_grad" in str(message.mismatch({"h": torch.ones(2, 3, requires_grad=True), "n": 3}))


def test_objects_are_refused_by_type() -> None:
    with pytest.raises(ValueError, match="a set crosses"):
        describe((torch.ones(1), {1, 2}))
