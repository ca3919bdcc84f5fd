"""The table of a sweep: one row per job, those that failed too, so that none is hidden.

Jobs that trained stand in their order, with what was measured. Where every job is a plan the table is that of
`plan.compare`: for each size of the pipeline the cheapest first.

A job leaves its figures in the summary.json of its folder on every exit path. The table is made from these files
alone, so it can be renewed after each job and made again later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.plan.choose import Choice, ranked
from engine.plan.choose import table as choice_table
from engine.report.files import write_json, write_text
from engine.report.tables import percent, table

Row = Mapping[str, Any]

_UNREADABLE = {"status": "failed", "error": "left no readable summary.json"}


def write_comparison(sweep_dir: Path | str, rows: Sequence[Row] | None = None) -> str:
    """Write comparison.txt and comparison.json into the folder of a sweep; returns the table.

    A row is a job's summary, with its folder's name as `job` and its overrides as `overrides`. Without `rows` they
    are read from the job folders.
    """
    folder = Path(sweep_dir)
    rows = read_rows(folder) if rows is None else rows
    text = comparison(rows)
    write_json(folder / "comparison.json", list(rows))
    write_text(folder / "comparison.txt", text + "\n")
    return text


def read_rows(sweep_dir: Path) -> list[Row]:
    """A row for every job folder below `sweep_dir`, by number where folders are numbered."""
    folders = [path for path in sweep_dir.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [_read(folder) for folder in sorted(folders, key=_by_number)]


def _by_number(folder: Path) -> tuple[int, int, str]:
    name = folder.name
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


def _read(folder: Path) -> Row:
    summary = _json(folder / "summary.json")
    if summary is None:
        summary = _UNREADABLE
    elif summary.get("mode") == "plan" and (plan := _json(folder / "plan.json")):
        peaks = [rank["peak_in_flight"] for rank in plan["per_rank"]]
        summary |= {"bubble": {"predicted": plan["bubble_fraction"]}, "peak_in_flight": peaks}
        summary |= {"plan": plan["choice"]}
    return {"job": folder.name, "overrides": _overrides(folder)} | summary


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content


def _overrides(folder: Path) -> list[str]:
    """What the job was given on the command line: a YAML list of plain or quoted words."""
    try:
        lines = (folder / ".hydra" / "overrides.yaml").read_text().splitlines()
    except OSError:
        return []
    return [line[2:].strip("'\"") for line in lines if line.startswith("- ")]


def comparison(rows: Sequence[Row]) -> str:
    """The table as text. Overrides that all jobs share are left out of it."""
    given = [list(row.get("overrides", [])) for row in rows]
    shared = set.intersection(*map(set, given)) if len(given) > 1 else set()
    if {row["mode"] for row in rows if "mode" in row} == {"plan"}:  # a job that was refused early does not say
        return _planned(rows, [[word for word in own if word not in shared] for own in given])
    head = [
        "job", "schedule", "ranks", "micro-batches", "replicas", "step ms", "samples/s", "ideal", "predicted",
        "measured", "peak in flight", "loss", "status", "overrides",
    ]  # fmt: skip
    lines = [_line(row, [word for word in own if word not in shared]) for row, own in zip(rows, given, strict=True)]
    failures = [f"job {row.get('job', '?')}: {_first_line(row['error'])}" for row in rows if row.get("error")]
    return "\n".join([table([head, *lines]), *([""] if failures else []), *failures])


def _planned(rows: Sequence[Row], overrides: Sequence[Sequence[str]]) -> str:
    """The comparison of plans; a row is named by its job, its schedule and what it alone was given."""
    sizes: dict[tuple[float, float], list[Choice]] = {}
    for row, given in zip(rows, overrides, strict=True):
        known = [str(row["schedule"])] if "schedule" in row else []
        words = [word for word in given if not (known and word.startswith("schedule="))]
        size = (row.get("ranks", math.inf), row.get("microbatches", math.inf))  # unknown: last
        choice = _choice("  ".join([str(row["job"]), *known, *words]), row.get("plan"), row.get("error"))
        sizes.setdefault(size, []).append(choice)
    return choice_table([choice for size in sorted(sizes) for choice in ranked(sizes[size])])


def _choice(name: str, plan: Mapping[str, Any] | None, error: str | None) -> Choice:
    if plan is None or error:
        return Choice(name, refused=_first_line(error or ""))
    return Choice(**{**plan, "name": name})


def _line(row: Row, overrides: Sequence[str]) -> list[str]:
    bubble = row.get("bubble") or {}
    seconds = (row.get("step_time") or {}).get("median")
    figures = [
        "-" if seconds is None else f"{seconds * 1e3:.1f}",
        _figure(row.get("samples_per_second"), ".1f"),
        *(percent(bubble.get(name)) for name in ("ideal", "predicted", "measured")),
        " ".join(map(str, row.get("peak_in_flight") or [])) or "-",
        _figure((row.get("loss") or {}).get("last"), ".4g"),
    ]
    names = [str(row.get(key, "-")) for key in ("job", "schedule", "ranks", "microbatches", "replicas")]
    return [*names, *figures, str(row.get("status", "unknown")), " ".join(overrides)]


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _first_line(error: str) -> str:
    return error.strip().splitlines()[0] if error.strip() else "no message"
