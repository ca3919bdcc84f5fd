"""The summary.json of a run that ended before anything was recorded."""

from __future__ import annotations

from pathlib import Path

from engine.files import write_json
from engine.settings import Settings

NAME = "summary.json"


def write_short_summary(folder: Path, status: str, error: str | None, settings: Settings | None) -> None:
    """Write how the run ended and, where it is known, what it was; UnwritableError where the folder takes no file."""
    summary: dict[str, object] = {"status": status, "error": error}
    if settings is not None:
        summary |= {
            "mode": settings.mode,
            "schedule": settings.schedule.get("name"),
            "ranks": settings.pipeline.ranks,
            "microbatches": settings.pipeline.microbatches,
            "replicas": settings.data_parallel.replicas,
        }
    write_json(folder / NAME, summary)
