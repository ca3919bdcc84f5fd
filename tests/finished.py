"""Folders of finished runs, without running anything: recorded steps of stages that take given times."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import recorded

from engine.job import Job, Layer
from engine.predict.measured import Measured, read

MS = recorded.MS


def job_of(
    schedule: str = "1f1b", ranks: int = 2, microbatches: int = 4, replicas: int = 1, layers: int = 1, sends: int = 4096
) -> Job:
    """Every stage has so many layers, and any of them could end one."""
    of = recorded.job(schedule, ranks, microbatches, replicas)
    count = of.placement.stages * layers
    found = tuple(Layer(f"block{i}", 10, 1, False, (sends, sends)) for i in range(count))
    settings = replace(of.settings, model={"_target_": "models.mlp", "loss": {}})
    return replace(of, settings=settings, layers=found, split=tuple(range(0, count, layers)))


def finished(
    folder: Path,
    of: Job | None = None,
    durations: np.ndarray | None = None,
    transfer: int = 0,
    steps: int = 4,
    status: str = "completed",
    **settings: Any,
) -> Path:
    """A run's folder, with what a prediction needs. `settings` replace some of the job's."""
    of = job_of() if of is None else of
    of = replace(of, settings=replace(of.settings, **settings))
    folder.mkdir(parents=True, exist_ok=True)
    record, _ = recorded.recorder(of, folder, progress=False)
    recorded.traced_run(record, steps, durations, transfer)
    for each in recorded.memory_records(of):
        record(each)
    record.finish(status, "it broke" if status == "failed" else None)
    (folder / "config.json").write_text(json.dumps(asdict(of.settings)))
    return folder


def measured(folder: Path, of: Job | None = None, **keywords: Any) -> Measured:
    return read(finished(folder, of, **keywords))
