"""From one member to all: broadcast and scatter.

broadcast   x ──► x  x  x        along a binomial tree, in pieces          ceil(log2 N) n from the source
scatter     xyz ──► x  y  z      straight from the source                  (N-1) n from the source
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.collectives.group import Group
from engine.collectives.peers import wait_all
from engine.collectives.shapes import binomial
from engine.collectives.tensors import dense, described, give_back
from engine.collectives.trees import down


def broadcast(tensor: Tensor, src: int, *, group: Group) -> None:
    """Copy `tensor` of world rank `src` into everybody's, which has the same shape and dtype."""
    group.agree(f"broadcast of {described(tensor)} from {src}", group.stranger("src", src))
    flat = dense(tensor)
    down(group.peers, binomial(group.size, group.place(src))[group.position], flat)
    if group.rank != src:
        give_back(tensor, flat)


def scatter(tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, src: int = 0, *, group: Group) -> None:
    """Copy the k-th tensor of the source's list into the `tensor` of the k-th member; others give no list."""
    group.agree(f"scatter of {described(tensor)} from {src}", _complaint(tensor, scatter_list, src, group))
    peers, source = group.peers, group.place(src)
    if group.rank != src:
        flat = dense(tensor)
        peers.recv(source, flat).wait()
        give_back(tensor, flat)
        return
    assert scatter_list is not None
    sent = [peers.send(k, dense(scatter_list[k])) for k in group.others]
    give_back(tensor, dense(scatter_list[source]))
    wait_all(sent)


def _complaint(tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int, group: Group) -> str | None:
    if group.rank != src:
        return group.stranger("src", src) or ("only the source gives a scatter_list" if scatter_list else None)
    if scatter_list is None or len(scatter_list) != group.size:
        given = "none" if scatter_list is None else str(len(scatter_list))
        return f"the source's scatter_list needs {group.size} tensors, one per member, not {given}"
    for number, each in enumerate(scatter_list):
        if (each.shape, each.dtype) != (tensor.shape, tensor.dtype):
            return f"scatter_list[{number}] is {described(each)}, tensor is {described(tensor)}"
    return None
