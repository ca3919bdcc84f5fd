"""Schedules as data: `build("1f1b", ranks=4, microbatches=8)` returns a compute-only Program.

A schedule is one file in this folder with a function that `@schedule` decorates; every file here is imported.
"""

import importlib
import pkgutil

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
    "evaluation",
    "largest_legal_microbatches",
    "offered_schedules",
]


def discover() -> None:
    """Import every file of this folder, so that its schedules register themselves."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


discover()
