"""Between all members: all-reduce, all-gather, reduce-scatter, barrier.

    all_reduce       x  y  z ──► x+y+z  x+y+z  x+y+z        the group's algorithm
    all_gather       x  y  z ──► xyz  xyz  xyz              straight from each to each
    reduce_scatter   abc  def  ghi ──► a+d+g  b+e+h  c+f+i  straight to whom it belongs, combined there

The last two send (N-1)/N of the whole per rank, the least there is. Part j of a reduce-scatter is
x_j + x_(j+1) + ..., the order of the ring: followed by an all-gather it gives the ring's bits (half precision is
combined in fp32 and rounded once, where the ring rounds at each hop).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.collectives.ops import HALF, ReduceOp, refusal, word
from engine.collectives.peers import message_pieces, views_like, wait_all
from engine.collectives.primitives.group import Group
from engine.collectives.primitives.tensors import apart, dense, described, described_all, give_back, own_mode


@own_mode
def all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, group: Group) -> None:
    """Combine everybody's `tensor`, in place, on everybody: bitwise the same on all of them."""
    call = f"all_reduce of {described(tensor)}, {word(op)}, by {group.collective.algorithm}"
    group.agree(call, refusal(op, tensor.dtype))
    flat = dense(tensor)
    group.collective.all_reduce(flat, op)
    give_back(tensor, flat)


@own_mode
def all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, *, group: Group) -> None:
    """Copy the k-th member's `tensor` into the k-th of everybody's list. Members' shapes may differ."""
    complaint = _list_complaint("tensor_list", tensor_list, tensor, group)
    group.agree(f"all_gather of {described_all(tensor_list)}", complaint)
    parts = [dense(each) for each in tensor_list]
    mine = apart(dense(tensor), [parts[k] for k in group.others])
    arriving = [group.peers.recv(k, parts[k]) for k in reversed(group.others)]
    wait_all([*(group.peers.send(k, mine) for k in group.others), *arriving])
    parts[group.position] = mine
    for each, part in zip(tensor_list, parts, strict=True):
        give_back(each, part)


@own_mode
def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, *, group: Group) -> None:
    """Concatenate or stack everybody's `input_tensor`, as `output_tensor` is shaped."""
    complaint = _whole_complaint(output_tensor, input_tensor, "output_tensor", "input_tensor", group)
    group.agree(f"all_gather_into_tensor of {described(input_tensor)}", complaint)
    flat = dense(output_tensor)
    parts = flat.view(group.size, -1) if len(flat) else flat.view(group.size, 0)
    mine = apart(dense(input_tensor), [parts[k] for k in group.others])
    arriving = [group.peers.recv(k, parts[k]) for k in reversed(group.others)]
    sent = [group.peers.send(k, mine) for k in group.others]
    parts[group.position].copy_(mine)
    wait_all([*sent, *arriving])
    give_back(output_tensor, flat)


@own_mode
def reduce_scatter(output: Tensor, input_list: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, *, group: Group) -> None:
    """Combine everybody's k-th input into the `output` of the k-th member. Inputs may differ in shape."""
    complaint = _list_complaint("input_list", input_list, output, group) or refusal(op, output.dtype)
    group.agree(f"reduce_scatter of {described_all(input_list)}, {word(op)}", complaint)
    _reduce_scatter(output, [dense(each) for each in input_list], op, group)


@own_mode
def reduce_scatter_tensor(output: Tensor, input: Tensor, op: ReduceOp = ReduceOp.SUM, *, group: Group) -> None:  # noqa: A002
    """Combine everybody's `input`, and keep the k-th of N equal parts on the k-th member."""
    complaint = _whole_complaint(input, output, "input", "output", group) or refusal(op, output.dtype)
    group.agree(f"reduce_scatter_tensor of {described(input)}, {word(op)}", complaint)
    _reduce_scatter(output, list(dense(input).tensor_split(group.size)), op, group)


@own_mode
def barrier(*, group: Group) -> None:
    """Return when all members have called."""
    group.meet("barrier")


def _reduce_scatter(output: Tensor, parts: Sequence[Tensor], op: ReduceOp, group: Group) -> None:
    """`parts`: flat, one per member."""
    peers, own = group.peers, parts[group.position]
    cut = message_pieces(own)
    arriving = {k: peers.operands(k, cut, ("reduce_scatter", k)) for k in reversed(group.others)}
    sent = [peers.send(k, piece) for k in group.others for piece in message_pieces(parts[k])]
    with torch.no_grad():
        total = _wide(own, op, group.size)
        if total is own and (output.data_ptr() != own.data_ptr() or not output.is_contiguous()):
            total = own.clone()
        for k in group.others:
            for piece, arrival in zip(views_like(cut, total), arriving[k], strict=True):
                op.combine(piece, _wide(arrival.wait(), op, group.size), out=piece)
                arrival.free()
        op.finish(total, group.size, own.dtype)
        wait_all(sent)  # the output may lie inside what is sent
        give_back(output, total)


def _wide(part: Tensor, op: ReduceOp, size: int) -> Tensor:
    """A part as it is combined: half precision in fp32, whatever the operation."""
    prepared = op.prepare(part, size)
    return prepared.float() if prepared.dtype in HALF else prepared


def _list_complaint(name: str, tensors: Sequence[Tensor], own: Tensor, group: Group) -> str | None:
    if len(tensors) != group.size:
        return f"{name} needs {group.size} tensors, one per member, not {len(tensors)}"
    if len({tensor.dtype for tensor in (*tensors, own)}) > 1:
        return f"{name} and this rank's own tensor have several dtypes: {described_all([*tensors, own])}"
    if tensors[group.position].shape != own.shape:
        here = described(tensors[group.position])
        return f"{name}[{group.position}] is {here}, this rank's own tensor {described(own)}"
    return None


def _whole_complaint(whole: Tensor, part: Tensor, whole_name: str, part_name: str, group: Group) -> str | None:
    if whole.dtype == part.dtype and whole.numel() == group.size * part.numel():
        return None
    return (
        f"{whole_name} is {described(whole)}, {part_name} {described(part)}: "
        f"the one needs {group.size} times the elements of the other, in the same dtype"
    )
