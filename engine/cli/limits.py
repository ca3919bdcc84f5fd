"""Refuse runs that need more memory, processes or open files than this host has."""

from __future__ import annotations

import math
import os

from engine.environment import inherited_files, joined, open_files
from engine.settings import Settings

MOST_PAIRS = 2**24  # of a rank and a micro-batch: four times a run of 1024 ranks and 4096 micro-batches
STAGES_PER_RANK = ("chunks", "waves")  # options of schedules that multiply them
MOST_WORKERS = 256  # on this host; also of one loader
FILES, FILES_PER_WORKER = 26, 3  # that the parent has open at once: its own, and what each is started and heard through


def check_limits(settings: Settings) -> None:
    """Raise ValueError for settings that do not fit this host, with the limits."""
    _check_size(settings)
    _check_files(settings)
    _check_pinning(settings)


def _check_size(settings: Settings) -> None:
    """Refuse programs and numbers of workers that are too large, mostly slips of the keyboard."""
    pipeline = settings.pipeline
    factors = {"pipeline.ranks": pipeline.ranks, "pipeline.microbatches": pipeline.microbatches}
    given = {f"schedule.{key}": settings.schedule.get(key) for key in STAGES_PER_RANK}
    factors |= {path: value for path, value in given.items() if isinstance(value, int) and value > 0}
    forwards = math.prod(factors.values())
    if forwards > MOST_PAIRS:
        shown = " x ".join(f"{path}={value}" for path, value in factors.items())
        raise ValueError(
            f"{shown} is {forwards:,} forwards; a program may hold at most {MOST_PAIRS:,}: lower one of them"
        )
    if settings.starts_ranks and settings.world > MOST_WORKERS and not joined():
        raise ValueError(
            f"pipeline.ranks={settings.pipeline.ranks} x data_parallel.replicas={settings.data_parallel.replicas} is "
            f"{settings.world} workers on this host; at most {MOST_WORKERS} are started here: lower one of them, or "
            "start the run on several hosts with torchrun"
        )


def _check_files(settings: Settings) -> None:
    """Refuse a run that needs more open files than `ulimit -n`; the parent or a library would stop while starting."""
    started = settings.launch == "processes" and not joined()
    inherited = inherited_files()
    needed = FILES + FILES_PER_WORKER * settings.world * started + inherited
    if settings.starts_ranks and open_files() < needed:
        already = f" ({inherited} of them were open when it started)" if inherited else ""
        raise ValueError(
            f"this process may open {open_files()} files{already}, and a run of {settings.world} ranks needs {needed}: "
            f"raise the limit (ulimit -n {max(1024, 2 * needed)}), or lower pipeline.ranks or data_parallel.replicas"
        )


def _check_pinning(settings: Settings) -> None:
    """Refuse pin_workers=always where ranks are threads or compute on GPUs."""
    unfit = {"with launch=threads": settings.launch == "threads", "with device=cuda": settings.device == "cuda"}
    for where, so in (unfit | {"on this system": not hasattr(os, "sched_setaffinity")}).items():
        if settings.pin_workers == "always" and so:
            raise ValueError(f"pin_workers=always is not possible {where}; use pin_workers=waiting or never")
