"""Programs that torch.distributed.pipelining's own schedule classes generate, as CSV files.

Of its classes for several stages per rank torch writes the file itself, computations alone or with communication. Its
GPipe and 1F1B exist twice there: as a plan, and as the loop that runs. The plan of 1F1B (torch 2.13) counts the last
rank's forwards from 1, so what that class means is taken from the loop: `executed`.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from torch.distributed.pipelining import schedules as peer

SINGLE = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}  # one stage per rank; the name of ours
MULTI = {  # two stages per rank; where it is the same schedule as one of ours, its name
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
    "ScheduleLoopedBFS": "looped_bfs",
    "ScheduleInterleavedZeroBubble": None,
    "ScheduleZBVZeroBubble": "zb_v",
    "ScheduleDualPipeV": "dualpipe_v",
}
OURS = SINGLE | MULTI
KINDS = [
    ("ScheduleGPipe", "planned"),
    *((name, "executed") for name in SINGLE),
    *((name, kind) for name in MULTI for kind in ("compute_only", "compute_comms")),
]


def write(name: str, kind: str, ranks: int, microbatches: int, path: Path) -> None:
    """Write the program of class `name`. `kind`: planned or executed; of several stages torch's own two formats."""
    if name in MULTI:
        stages = [_stage(c * ranks, 2 * ranks, ranks) for c in range(2)]
        getattr(peer, name)(stages, microbatches, scale_grads=False)._dump_csv(path, kind)
        return
    rows: list[list[Any]]
    if kind == "planned":
        order = getattr(peer, name)(_stage(0, ranks, ranks), microbatches)._get_pipeline_order()
        rows = [order[rank] for rank in range(ranks)]
    else:
        rows = [_executed(name, rank, ranks, microbatches) for rank in range(ranks)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def _stage(index: int, stages: int, ranks: int) -> MagicMock:
    """A stand-in for what a schedule asks of a stage; nothing is sent."""
    stage = MagicMock(stage_index=index, num_stages=stages, group_size=ranks, group_rank=0)
    for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, ops).return_value = []
    return stage


def _executed(name: str, rank: int, ranks: int, microbatches: int) -> list[str]:
    """What the loop of a rank does, in order."""
    row: list[str] = []
    stage = _stage(rank, ranks, ranks)
    stage.forward_one_chunk.side_effect = lambda m, *_, **__: row.append(f"{rank}F{m}")
    stage.backward_one_chunk.side_effect = lambda m, *_, **__: row.append(f"{rank}B{m}")
    schedule = getattr(peer, name)(stage, microbatches)
    schedule._initialize_stage = MagicMock()
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return row
