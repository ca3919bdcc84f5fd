"""Channels between GPUs: NCCL, one two-rank communicator per directed edge.

NCCL matches by order inside a communicator, so one shared by several channels would turn independent waits into a
deadlock. `Work.wait` makes the *current stream* wait and returns at once: the host is not blocked, and what the
stream does next sees the payload. A peer that stays silent is therefore not noticed by `wait` but by NCCL's watchdog
thread, which after `timeout_s` ends the process; the supervisor names it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from engine.runtime.transport.c10d import C10dTransport


class NcclTransport(C10dTransport):
    """`device`: this rank's own GPU; two ranks cannot share one. Carries device tensors."""

    def _connect(self, store: Store, rank: int, size: int) -> Any:
        from torch.distributed import ProcessGroupNCCL  # only where torch was built for CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        group = ProcessGroupNCCL(store, rank, size, options)
        with torch.cuda.device(self.device):
            group.eager_connect_single_device(self.device)  # now, in list order: the first message pays nothing
        return group

    def _break(self, group: Any, rank: int) -> None:
        group.abort()

    def close(self) -> None:
        for group in [*(channel.group for channel in self._channels.values()), *self._groups.values()]:
            group.shutdown()
        super().close()
