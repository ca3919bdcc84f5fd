"""A row for every job of a sweep, read from the job's folder: what its summary.json says, and what it was given.

A job leaves its figures in the summary.json of its folder on every exit path, so a job without one is still running or
was killed. Everything that is shown of a sweep is made of these rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from engine.files import read_json
from engine.folder import schemas

Row = Mapping[str, Any]

_MARKS = ("summary.json", ".hydra", "config.json", "engine.log")  # of a job's folder
_OURS = ("job", "overrides", "plan")  # of a row, whatever a summary says
_UNFINISHED = {"status": "unfinished", "error": "left no summary.json: it is still running, or it was killed"}
_UNREADABLE = {"status": "failed", "error": "left no readable summary.json"}


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a sweep: Hydra leaves multirun.yaml there, and we leave the comparison."""
    marked = any((folder / name).exists() for name in ("multirun.yaml", "comparison.json"))
    return marked and not (folder / "summary.json").exists()  # a run that compared plans leaves a comparison too


def read_rows(sweep_dir: Path) -> list[Row]:
    """A row for every job folder below `sweep_dir`, by number where folders are numbered.

    It goes by its path from there: with `hydra.sweep.subdir` jobs may lie deeper.
    """
    return [_read(folder, folder.relative_to(sweep_dir).as_posix()) for folder in job_folders(sweep_dir)]


def job_folders(folder: Path) -> list[Path]:
    """The folders of jobs below a sweep's, an empty one too: its job was killed before it left anything."""
    found: list[Path] = []
    below = (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    for path in sorted(below, key=_by_number):
        known = any((path / mark).exists() for mark in _MARKS) or next(path.iterdir(), None) is None
        found += [path] if known else [] if path.is_symlink() else job_folders(path)
    return found


def _by_number(folder: Path) -> tuple[int, int, str]:
    name = folder.name
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _read(folder: Path, name: str) -> Row:
    if not (folder / "summary.json").exists():
        summary: dict[str, Any] = dict(_UNFINISHED)
    else:
        summary = _json(folder / "summary.json", schemas.Summary, dict(_UNREADABLE))
        summary = {key: value for key, value in summary.items() if key not in _OURS}
    if summary.get("mode") == "plan" and (plan := _json(folder / "plan.json", schemas.Plan, {})):
        peaks = [rank["peak_in_flight"] for rank in plan["per_rank"]]
        summary |= {"bubble": {"predicted": plan["bubble_fraction"]}, "peak_in_flight": peaks}
        summary |= {"plan": plan["choice"]}
    return {"job": writable(name), "overrides": _overrides(folder)} | summary


def _json(path: Path, schema: Any, otherwise: dict[str, Any]) -> Any:
    """The object in a file, or what is said where there is none; a damaged one is a failure that names the damage."""
    content = read_json(path)
    if content is None:
        return otherwise
    content = _writable(content)
    try:
        schemas.check(content, schema, path.name)
    except schemas.Damaged as error:
        return {"status": "failed", "error": str(error)} if otherwise else {}
    return content


def _overrides(folder: Path) -> list[str]:
    """What the job was given on the command line."""
    try:
        words = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(errors="replace"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    return [writable(str(word)) for word in words] if isinstance(words, list) else []


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, dict):
        return {key: _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value


def writable(text: str) -> str:
    """The text with a question mark for what no file can hold: halves of surrogate pairs."""
    return text.encode(errors="replace").decode()
