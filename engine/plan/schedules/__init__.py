"""Schedules as data: `build("1f1b", ranks=4, microbatches=8)` returns a compute-only Program.

Adding a schedule: write its file, decorate its function, import it below.
"""

from engine.plan.schedules import forward_only, gpipe, naive, one_f_one_b
from engine.plan.schedules.registry import (
    SCHEDULES,
    ScheduleInfo,
    build,
    largest_legal_microbatches,
    offered_schedules,
)

__all__ = [
    "SCHEDULES",
    "ScheduleInfo",
    "build",
    "forward_only",
    "gpipe",
    "largest_legal_microbatches",
    "naive",
    "offered_schedules",
    "one_f_one_b",
]
