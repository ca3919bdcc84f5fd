"""Starting from the same point: one rank's parameters and optimizer state, copied to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.collectives import Group, broadcast
from engine.collectives.primitives.tensors import own_mode
from engine.distributed.nested import pack, unpack
from engine.distributed.world import World, current
from engine.errors import a_type
from engine.gradients.layout_check import require_alike

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@own_mode
def broadcast_parameters(params: Named, root_rank: int = 0, world: World | None = None) -> None:
    """Copy the tensors of `root_rank` (a `state_dict()` or named pairs) into everybody's, in place.

    ValueError on all ranks where their names, shapes or dtypes differ.
    """
    items = named_pairs("params", params.items() if isinstance(params, Mapping) else params)
    group = (world or current()).group
    words = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in items]
    with group.during("broadcast_parameters()"), torch.no_grad():
        require_alike(group.collective, [f"from rank {root_rank}", *words], "all ranks must pass the same", "tensors")
        for _, value in items:
            here = value.detach().to(group.peers.transport.device)
            broadcast(here, root_rank, group=group)
            if here.data_ptr() != value.data_ptr():
                value.copy_(here)


@own_mode
def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0, world: World | None = None) -> None:
    """Load the state of `root_rank`'s optimizer into everybody's: momenta, step counts, learning rates, all of it.

    The others need not have any state yet. ValueError on all ranks where the optimizer's state is more than plain data.
    """
    group = (world or current()).group
    with group.during("broadcast_optimizer_state()"):
        state = broadcast_value(optimizer.state_dict() if group.rank == root_rank else None, root_rank, group)
    if group.rank != root_rank:
        optimizer.load_state_dict(state)


def named_pairs(argument: str, given: Any) -> list[tuple[str, Any]]:
    """Return the (name, tensor) pairs of an argument; ValueError where it is anything else."""
    items = list(given) if isinstance(given, Iterable) and not isinstance(given, Tensor | nn.Module) else [given]
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ValueError(
                f"{argument} holds {a_type(item)} where a pair of name and tensor is needed: "
                "pass model.named_parameters() or model.state_dict().items()"
            )
        if not isinstance(item[1], Tensor):
            raise ValueError(f"{argument}: {item[0]} is {a_type(item[1])}, not a tensor; leave it out")
    return items


def broadcast_value(value: Any, root_rank: int, group: Group) -> Any:
    """Return the root's nested plain data (see `nested`) on everybody; what the others pass does not matter."""
    device = group.peers.transport.device
    data, complaint = b"", group.stranger("root_rank", root_rank)
    if group.rank == root_rank:
        try:
            data = pack(value)
        except ValueError as error:
            complaint = str(error)
    group.agree(f"plain data from rank {root_rank}", complaint)
    length = torch.tensor([len(data)], device=device)
    broadcast(length, root_rank, group=group)
    raw = torch.empty(int(length), dtype=torch.uint8)
    if group.rank == root_rank:
        raw.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    sent = raw.to(device)
    broadcast(sent, root_rank, group=group)
    return value if group.rank == root_rank else unpack(sent.cpu().numpy().tobytes())
