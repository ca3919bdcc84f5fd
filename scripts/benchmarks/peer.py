"""One worker of torch.distributed.pipelining: `python -m benchmarks.peer CASE RANK FOLDER`.

It trains the case's layers with the library's own stage and schedule over gloo, as its documentation does it: zero the
gradients, schedule.step, optimizer step, no barrier. FOLDER/peerRANK.json gets the times at which steps ended and how
long the stage's forwards and backwards took.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.cases import CASES, Case
from benchmarks.layers import batch_of, mean_loss, optimizer_of, stage_of

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
TIMEOUT = timedelta(seconds=120)


class TimedStage(PipelineStage):
    """The library's stage, with a clock around the two calls in which it runs the module and its autograd graph."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.durations: dict[str, list[float]] = defaultdict(list)

    def forward_maybe_with_nosync(self, *args: Any, **keywords: Any) -> Any:
        return self._timed("F", super().forward_maybe_with_nosync, args, keywords)

    def backward_maybe_with_nosync(self, *args: Any, **keywords: Any) -> Any:
        return self._timed("B", super().backward_maybe_with_nosync, args, keywords)

    def _timed(self, op: str, call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **keywords)
        finally:
            self.durations[op].append(time.perf_counter() - start)


def train(case: Case, rank: int) -> dict[str, Any]:
    """Run the case's steps on this rank: the ends of its steps, its durations after the warm-up, its last loss."""
    module = stage_of(case.job, rank)
    optimizer = optimizer_of(case.job, module)
    stage = TimedStage(module, rank, case.ranks, torch.device("cpu"))
    schedule = SCHEDULES[case.schedule](stage, case.microbatches, loss_fn=mean_loss(case.job))
    inputs, targets = batch_of(case.job)
    ends: list[float] = []
    for step in range(case.steps):
        if step == case.warmup:
            stage.durations.clear()
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (inputs,) if rank == 0 else ()
        wanted = {"target": targets, "losses": losses} if rank == case.ranks - 1 else {}
        schedule.step(*given, **wanted)
        optimizer.step()
        ends.append(time.perf_counter())
    loss = float(torch.stack(losses).mean()) if losses else None
    return {"ends": ends, "durations": stage.durations, "loss": loss}


def main(name: str, rank: int, folder: Path) -> None:
    case = CASES[name]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=case.ranks, timeout=TIMEOUT
    )
    result = train(case, rank)
    (folder / f"peer{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
