"""From all members to one: reduce and gather.

reduce   x  y  z ──► x+y+z       along a binomial tree, in pieces          n from everybody but the destination
gather   x  y  z ──► xyz         straight to the destination               n from everybody but the destination
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.collectives.ops import ReduceOp, refusal, word
from engine.collectives.peers import wait_all
from engine.collectives.primitives.group import Group
from engine.collectives.primitives.tensors import apart, dense, described, give_back, own_mode
from engine.collectives.topologies import binomial
from engine.collectives.trees import up


@own_mode
def reduce(tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, *, group: Group) -> None:
    """Combine everybody's `tensor` into that of world rank `dst`; the others' stay as they are."""
    complaint = group.stranger("dst", dst) or refusal(op, tensor.dtype)
    group.agree(f"reduce of {described(tensor)} to {dst}, {word(op)}", complaint)
    node = binomial(group.size, group.place(dst))[group.position]
    flat = dense(tensor)
    with torch.no_grad():
        part = op.prepare(flat, group.size)
        if part is flat and group.rank != dst and node.children:
            part = flat.clone()  # a subtree's combination is put together here
        up(group.peers, node, part, op)
        if group.rank == dst:
            op.finish(part, group.size, flat.dtype)
            give_back(tensor, part)


@own_mode
def gather(tensor: Tensor, gather_list: Sequence[Tensor] | None = None, dst: int = 0, *, group: Group) -> None:
    """Copy the `tensor` of the k-th member into the k-th of the destination's list; others give no list."""
    group.agree(
        f"gather of {described(tensor)} to {dst}",
        group.list_complaint("destination", "dst", dst, "gather_list", gather_list, tensor),
    )
    peers = group.peers
    if group.rank != dst:
        peers.send(group.place(dst), dense(tensor)).wait()
        return
    assert gather_list is not None
    parts = [dense(each) for each in gather_list]
    parts[group.position] = apart(dense(tensor), [parts[k] for k in group.others])
    wait_all([peers.recv(k, parts[k]) for k in group.others])
    for each, part in zip(gather_list, parts, strict=True):
        give_back(each, part)
