"""From each member to each, something of its own: member i's k-th tensor becomes member k's i-th.

    ab  cd ──► ac  bd          straight from each to each

What is sent to a member is known only to the pair, so a checked call compares the whole table of sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from engine.collectives.peers import wait_all
from engine.collectives.primitives.group import Group
from engine.collectives.primitives.many_to_many import all_gather
from engine.collectives.primitives.tensors import apart, dense, described, give_back, name, own_mode


@own_mode
def all_to_all(output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], *, group: Group) -> None:
    """Send the k-th input to the k-th member, receive its part for us into the k-th output; sizes may all differ."""
    tensors = [*output_tensor_list, *input_tensor_list]
    group.agree(f"all_to_all of {_dtypes(tensors)}", _complaint(output_tensor_list, input_tensor_list, group))
    if group.checked:
        _compare_sizes(output_tensor_list, input_tensor_list, group)
    parts = [dense(each) for each in output_tensor_list]
    written = [parts[k] for k in group.others]
    leaving = [apart(dense(each), written) for each in input_tensor_list]
    arriving = [group.peers.recv(k, parts[k]) for k in reversed(group.others)]
    wait_all([*(group.peers.send(k, leaving[k]) for k in group.others), *arriving])
    parts[group.position] = leaving[group.position]
    for each, part in zip(output_tensor_list, parts, strict=True):
        give_back(each, part)


@own_mode
def all_to_all_single(
    output: Tensor,
    input: Tensor,  # noqa: A002
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: Group,
) -> None:
    """Exchange parts of one tensor along its first dimension, equal ones where no sizes are given."""
    outputs, wrong_output = _split("output", output, output_split_sizes, group.size)
    inputs, wrong_input = _split("input", input, input_split_sizes, group.size)
    group.agree("all_to_all_single", wrong_output or wrong_input)
    all_to_all(outputs, inputs, group=group)


def _split(what: str, tensor: Tensor, sizes: Sequence[int] | None, count: int) -> tuple[list[Tensor], str | None]:
    """The parts; or none, and what is wrong."""
    if not tensor.dim():
        return [], f"{what} is {described(tensor)}: it has no dimension to be cut along"
    rows = tensor.shape[0]
    if sizes is None:
        if rows % count:
            return [], f"{what} has {rows} rows, not a multiple of {count}: give {what}_split_sizes"
        sizes = [rows // count] * count
    if not all(isinstance(size, Integral) and size >= 0 for size in sizes) or (len(sizes), sum(sizes)) != (count, rows):
        return [], f"{what}_split_sizes={list(sizes)} must be {count} whole numbers that add up to {rows}"
    return list(tensor.split(list(sizes))), None


def _complaint(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Group) -> str | None:
    for what, tensors in (("output_tensor_list", outputs), ("input_tensor_list", inputs)):
        if len(tensors) != group.size:
            return f"{what} needs {group.size} tensors, one per member, not {len(tensors)}"
    if len({tensor.dtype for tensor in (*outputs, *inputs)}) > 1:
        return f"the tensors have several dtypes: {_dtypes([*outputs, *inputs])}"
    here, there = inputs[group.position], outputs[group.position]
    if here.numel() != there.numel():
        return f"a rank's part for itself is {described(here)} as input, {described(there)} as output"
    return None


def _compare_sizes(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Group) -> None:
    """ValueError on all members where one sends what its receiver does not expect."""
    device = group.peers.transport.device
    mine = torch.tensor([[t.numel() for t in inputs], [t.numel() for t in outputs]], device=device)
    tables = [torch.empty_like(mine) for _ in range(group.size)]
    all_gather(tables, mine, group=group)
    sends, expects = (torch.stack([table[row] for table in tables]).tolist() for row in (0, 1))
    wrong = [
        f"rank {group.members[a]} sends {sends[a][b]} elements to rank {group.members[b]}, "
        f"which expects {expects[b][a]}"
        for a in range(group.size)
        for b in range(group.size)
        if sends[a][b] != expects[b][a]
    ]
    if wrong:
        raise ValueError(f"{group.label}: all_to_all: {'; '.join(wrong)}")


def _dtypes(tensors: Sequence[Tensor]) -> str:
    return "/".join(dict.fromkeys(name(tensor.dtype) for tensor in tensors))
