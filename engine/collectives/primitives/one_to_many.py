"""From one member to all: broadcast and scatter.

broadcast   x ──► x  x  x        along a binomial tree, in pieces          ceil(log2 N) n from the source
scatter     xyz ──► x  y  z      straight from the source                  (N-1) n from the source
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.collectives.peers import wait_all
from engine.collectives.primitives.group import Group
from engine.collectives.primitives.tensors import dense, described, give_back, own_mode
from engine.collectives.topologies import binomial
from engine.collectives.trees import down


@own_mode
def broadcast(tensor: Tensor, src: int, *, group: Group) -> None:
    """Copy `tensor` of world rank `src` into everybody's, which has the same shape and dtype."""
    group.agree(f"broadcast of {described(tensor)} from {src}", group.stranger("src", src))
    flat = dense(tensor)
    down(group.peers, binomial(group.size, group.place(src))[group.position], flat)
    if group.rank != src:
        give_back(tensor, flat)


@own_mode
def scatter(tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, src: int = 0, *, group: Group) -> None:
    """Copy the k-th tensor of the source's list into the `tensor` of the k-th member; others give no list."""
    group.agree(
        f"scatter of {described(tensor)} from {src}",
        group.list_complaint("source", "src", src, "scatter_list", scatter_list, tensor),
    )
    peers, source = group.peers, group.place(src)
    if group.rank != src:
        flat = dense(tensor)
        peers.recv(source, flat).wait()
        give_back(tensor, flat)
        return
    assert scatter_list is not None
    sent = [peers.send(k, dense(scatter_list[k])) for k in group.others]
    wait_all(sent)  # the tensor may lie inside what is sent
    give_back(tensor, dense(scatter_list[source]))
