"""Schedules as data: `build("1f1b", ranks=4, microbatches=8)` returns a compute-only Program.

Adding a schedule: write its file, decorate its function, import it below.
"""

from engine.plan.schedules import (
    chimera,
    csv_file,
    dualpipe,
    dualpipe_v,
    forward_only,
    gpipe,
    hanayo,
    interleaved_1f1b,
    looped_bfs,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from engine.plan.schedules.forward_only import evaluation
from engine.plan.schedules.registry import (
    SCHEDULES,
    ScheduleInfo,
    Stream,
    build,
    largest_legal_microbatches,
    offered_schedules,
)

__all__ = [
    "SCHEDULES",
    "ScheduleInfo",
    "Stream",
    "build",
    "chimera",
    "csv_file",
    "dualpipe",
    "dualpipe_v",
    "evaluation",
    "forward_only",
    "gpipe",
    "hanayo",
    "interleaved_1f1b",
    "largest_legal_microbatches",
    "looped_bfs",
    "naive",
    "offered_schedules",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
