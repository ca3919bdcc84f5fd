"""The comparison of a sweep's jobs, those that failed too, so that none is hidden: as text and as a page.

    comparison.json    a row per job (sweep/rows.py): everything else is made of it
    comparison.txt     the table, who is best, scaling, and the ways to train in parallel
    comparison.html    the same as pictures

Jobs that trained stand in their order, with what was measured. Where every job is a plan the table is that of
`plan.compare`: for each size of the pipeline the cheapest first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.files import write_json, write_text
from engine.folder.rows import Row, read_rows, writable
from engine.plan.choose import Choice, ranked
from engine.plan.choose import table as choice_table
from engine.report.sweep.page import page
from engine.report.sweep.pareto import Front, fronts
from engine.report.sweep.results import Result, Sweep, first_line, sweep_of, word
from engine.report.sweep.scaling import curves
from engine.report.sweep.ways import NOTE, way_rows
from engine.tables import percent, size, table

PAGE = "comparison.html"


def write_comparison(sweep_dir: Path | str, rows: Sequence[Row] | None = None) -> str:
    """Write comparison.txt, .json and .html into the folder of a sweep; returns the text.

    A row is a job's summary, with its folder's name as `job` and its overrides as `overrides`. Without `rows` they
    are read from the job folders.
    """
    folder = Path(sweep_dir)
    rows = read_rows(folder) if rows is None else rows
    text = comparison(rows)
    write_json(folder / "comparison.json", list(rows))
    write_text(folder / "comparison.txt", text + "\n")
    write_text(folder / PAGE, page(sweep_of(rows), writable(folder.absolute().name)))
    return text


def comparison(rows: Sequence[Row]) -> str:
    """The whole comparison as text. Overrides that all jobs share are left out of it."""
    sweep = sweep_of(rows)
    planned = {row["mode"] for row in rows if "mode" in row} == {"plan"}  # a job that was refused early does not say
    if planned and not any("step_time" in row for row in rows):  # one that trained has another summary
        return "\n\n".join([_planned(sweep), "\n".join(map(_front_text, fronts(sweep)))]).rstrip()
    head = [
        "job", "schedule", "ranks", "micro-batches", "replicas", "step ms", "samples/s", "ideal", "predicted",
        "measured", "peak in flight", "peak memory", "loss", "status", "overrides",
    ]  # fmt: skip
    failures = [f"job {result.job}: {result.reason}" for result in sweep.results if result.reason]
    parts = [table([head, *map(_line, sweep.results)]), *["\n".join(failures)] * bool(failures)]
    parts += map(_front_text, fronts(sweep))
    found, refused = curves(sweep)
    for curve in found:
        title = f"Scaling over {word(curve.key)}" + (f", {curve.common}" if curve.common else "")
        parts.append(f"{title}. {curve.sentence}\n{curve.gains}")
    parts += refused
    if ways := way_rows(sweep):
        parts.append(f"Plain, data-parallel, model-parallel. {NOTE}\n\n{table(ways)}")
    return "\n\n".join(parts)


def _front_text(found: Front) -> str:
    best = [found.points[index] for index in found.best]
    jobs = ", ".join(
        f"job {result.job} ({found.time.text(time)}, {found.memory.text(memory)})" for time, memory, result in best
    )
    return f"Pareto front of {found.title}: {jobs}."


def _planned(sweep: Sweep) -> str:
    """The comparison of plans; a row is named by its job, its schedule and what it alone was given."""
    sizes: dict[tuple[float, float], list[Choice]] = {}
    for result in sweep.results:
        row = result.row
        known = [str(row["schedule"])] if "schedule" in row else []
        words = [word for word in result.given if not (known and word.startswith("schedule="))]
        size = (row.get("ranks", math.inf), row.get("microbatches", math.inf))  # unknown: last
        choice = _choice("  ".join([result.job, *known, *words]), row.get("plan"), row.get("error"))
        sizes.setdefault(size, []).append(choice)
    return choice_table([choice for size in sorted(sizes) for choice in ranked(sizes[size])])


def _choice(name: str, plan: Mapping[str, Any] | None, error: str | None) -> Choice:
    if plan is None or error:
        return Choice(name, refused=first_line(error or ""))
    return Choice(**{**plan, "name": name})


def _line(result: Result) -> list[str]:
    row, figures = result.row, result.figures
    seconds, memory = figures.get("step"), figures.get("memory")
    cells = [
        "-" if seconds is None else f"{seconds * 1e3:.1f}",
        _figure(figures.get("rate"), ".1f"),
        *(percent(figures.get(name)) for name in ("ideal", "predicted", "measured")),
        " ".join(map(str, row.get("peak_in_flight") or [])) or "-",
        "-" if memory is None else size(memory),
        _figure((row.get("loss") or {}).get("last"), ".4g"),
    ]
    names = [str(row.get(key, "-")) for key in ("job", "schedule", "ranks", "microbatches", "replicas")]
    return [*names, *cells, result.status, " ".join(result.given)]


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
