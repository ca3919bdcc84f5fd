"""The whole model on world rank 0: the first copies of replica 0 send it their stages, one after another.

    rank 1 ──► rank 0 ◄── rank 2        a channel from each other rank that holds a stage; opened with all others

The others go on at once. Rank 0 holds the whole model in the memory of its host, the others a stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.distributed.nested import pack, unpack
from engine.pipeline.stage.stage import Stage
from engine.plan.actions import Placement
from engine.transport import Channel, Edge, Transport

LABEL = "weights"


def edges(placement: Placement) -> list[Edge]:
    """The channels that `Transport.open` must be given."""
    return [Edge(rank, 0, LABEL) for rank in sorted(set(placement.rank_of[0])) if rank != 0]


def gather(stages: Mapping[int, Stage], placement: Placement, transport: Transport) -> dict[str, Any]:
    """Name -> copy on the CPU, in the order of the model, on rank 0; nothing on the others. All ranks call it."""
    state: dict[str, Any] = {}
    for stage, owner in enumerate(placement.rank_of[0]):
        if transport.rank == owner:
            own = {name: _copy(value) for name, value in stages[stage].state_dict().items()}
            if owner == 0:
                state |= own
            else:
                _send(own, transport.channel(Edge(owner, 0, LABEL)), transport.device)
        elif transport.rank == 0:
            state |= _receive(transport.channel(Edge(owner, 0, LABEL)), transport.device)
    return state


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, Tensor) else value


def _send(state: Mapping[str, Any], channel: Channel, device: torch.device) -> None:
    """Send what the tensors are, then each of them as bytes."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    about = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors.items()]
    head = torch.frombuffer(bytearray(pack(about)), dtype=torch.uint8)
    parts = [torch.tensor([len(head)]), head, *(value.reshape(-1).view(torch.uint8) for value in tensors.values())]
    for part in parts:
        if part.numel():
            channel.isend(part.to(device)).wait()


def _receive(channel: Channel, device: torch.device) -> dict[str, Tensor]:
    def take(size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        found = torch.empty(size, dtype=dtype, device=device)
        if size:
            channel.irecv(found).wait()
        return found.cpu()

    about = unpack(take(int(take(1, torch.int64))).numpy().tobytes())
    state = {}
    for name, kind, shape in about:
        dtype = getattr(torch, kind)
        state[name] = take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
    return state
