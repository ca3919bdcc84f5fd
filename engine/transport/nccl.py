"""Channels between GPUs: NCCL, one two-rank communicator per directed edge.

NCCL matches by order inside a communicator, so one shared by several channels would turn independent waits into a
deadlock. `Work.wait` makes the *current stream* wait and returns at once: the host is not blocked, and what the
stream does next sees the payload. A peer that stays silent is therefore not noticed by `wait` but by NCCL's watchdog
thread, which after `timeout_s` ends the process; the supervisor names it.

A communicator comes to life with its first operation, and that one does block the host until the peer joins in. Two
neighbours that both send first would wait for each other for ever, so everything is used once while it is opened, in
list order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from engine.transport import Edge, Endpoint
from engine.transport.c10d import RECEIVER, SENDER, C10dTransport
from engine.transports import TRANSPORTS


def make(endpoint: Endpoint) -> NcclTransport:
    """Make the transport of one process, whose own GPU is `endpoint.device`."""
    return NcclTransport(endpoint.rank, endpoint.world, endpoint.meeting, endpoint.timeout_s, endpoint.device)


class NcclTransport(C10dTransport):
    """Channels and sums over NCCL between GPUs.

    `device`: this rank's own GPU; two ranks cannot share one. Carries device tensors.
    """

    info = TRANSPORTS["nccl"]

    def open(self, edges: Sequence[Edge]) -> None:
        """Connect this rank's ends of `edges` and use each once, in the same order on all ranks."""
        super().open(edges)
        nothing = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for edge, channel in self._channels.items():
            sending = edge.src == self.rank
            call, peer = (channel.group.send, RECEIVER) if sending else (channel.group.recv, SENDER)
            call([nothing], peer, 0).wait()
        torch.cuda.synchronize(self.device)

    def open_group(self, members: Sequence[int], label: str, backend: bool = False) -> None:
        """Connect the members of later sums and sum once over them."""
        super().open_group(members, label, backend)
        self.all_reduce(torch.zeros(1, device=self.device), members, label).wait()
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Shut every communicator down, after the last wait."""
        for group in [*(channel.group for channel in self._channels.values()), *self._groups.values()]:
            group.shutdown()
        super().close()

    def _connect(self, store: Store, rank: int, size: int) -> Any:
        from torch.distributed import ProcessGroupNCCL  # only where torch was built for CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        return ProcessGroupNCCL(store, rank, size, options)

    def _break(self, group: Any, rank: int) -> None:
        group.abort()
