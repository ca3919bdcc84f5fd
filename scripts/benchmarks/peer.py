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
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.cases import CASES, Case
from benchmarks.layers import batch_of, halved, mean_loss, optimizer_of, stage_of

TIMEOUT = timedelta(seconds=120)


class TimedStage(PipelineStage):
    """The library's stage, with a clock around the two calls in which it runs the module and its autograd graph."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.durations: dict[str, list[float]] = defaultdict(list)
        self._in_weights = False

    def forward_maybe_with_nosync(self, *args: Any, **keywords: Any) -> Any:
        return self._timed("F", super().forward_maybe_with_nosync, args, keywords)

    def backward_weight_one_chunk(self, *args: Any, **keywords: Any) -> None:
        self._in_weights = True  # of the first stage the library does all of the backward here
        super().backward_weight_one_chunk(*args, **keywords)
        self._in_weights = False

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **keywords: Any) -> Any:
        op = "W" if self._in_weights else "B" if backward_type == "full" else "I"
        return self._timed(op, super().backward_maybe_with_nosync, (backward_type, *args), keywords)

    def _timed(self, op: str, call: Callable[..., Any], args: Any, keywords: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **keywords)
        finally:
            self.durations[op].append(time.perf_counter() - start)


def train(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    """Run the case's steps on this rank: the ends of its steps, its durations, its last loss.

    A schedule of several stages per rank writes its program into `folder`.
    """
    last = case.job.placement.stages - 1
    indices = case.job.placement.stages_of(rank)
    kind = getattr(schedules, str(case.theirs))
    modules = torch.nn.ModuleList(halved(stage_of(case.job, index)) for index in indices)
    optimizer = optimizer_of(case.job, modules)
    stages = [
        TimedStage(module, index, last + 1, torch.device("cpu")) for module, index in zip(modules, indices, strict=True)
    ]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, case.microbatches, loss_fn=mean_loss(case.job))
    if rank == 0 and not single:
        schedule._dump_csv(folder / "program.csv", "compute_only")
    inputs, targets = batch_of(case.job)
    ends: list[float] = []
    for _step in range(case.steps):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (inputs,) if 0 in indices else ()
        wanted = {"target": targets, "losses": losses} if last in indices else {}
        schedule.step(*given, **wanted)
        optimizer.step()
        ends.append(time.perf_counter())
    loss = float(torch.stack(losses).mean()) if losses else None
    durations = {f"{op} {stage.stage_index}": times for stage in stages for op, times in stage.durations.items()}
    return {"ends": ends, "durations": durations, "loss": loss}


def main(name: str, rank: int, folder: Path) -> None:
    case = CASES[name]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=case.ranks, timeout=TIMEOUT
    )
    result = train(case, rank, folder)
    (folder / f"peer{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
