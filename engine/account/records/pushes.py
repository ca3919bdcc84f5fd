"""Asynchronous replicas: how long each takes for a step, and how stale what it pushes is.

Replicas are at different steps at the same time, so a step of the report is the step of that number on each of them,
whenever that was. `STALE` is the shape of the table of staleness: the last row of a replica that is far behind would
else be hundreds of rows away.
"""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.job import Job
from engine.tables import Rows, counted
from engine.telemetry.records import PUSH_COLUMNS, Record

STALE = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024)  # where each row of the table begins


@dataclass(frozen=True)
class Pushed:
    """A step of one replica. `seconds`: the mean over its ranks; `staleness` of its pushes: one per stage and server;
    `held`: seconds for which the bound kept back the rank that it kept back longest.
    """

    seconds: float
    staleness: tuple[int, ...]
    held: float


def pushed(job: Job, records: Sequence[Record]) -> tuple[Pushed, ...]:
    """What each replica did in a step, from the records of all ranks in order; empty where replicas are in step."""
    if not job.settings.data_parallel.asynchronous:
        return ()
    found = []
    for first in range(0, job.world, job.ranks):
        own = records[first : first + job.ranks]
        windows = [record.meta["window"] for record in own]
        tables = [record.arrays["pushes"].reshape(-1, PUSH_COLUMNS).tolist() for record in own]
        staleness = tuple(applied - read for rows in tables for _, _, read, applied, _ in rows)
        held = max((sum(row[-1] for row in rows) for rows in tables), default=0)
        seconds = sum(end - start for start, end in windows) / len(windows) * 1e-9
        found.append(Pushed(seconds, staleness, held * 1e-9))
    return tuple(found)


def together(steps: Iterable[Pushed]) -> float:
    """Seconds in which all replicas together do as much as one step of each: the harmonic mean of theirs."""
    seconds = [step.seconds for step in steps]
    return len(seconds) / sum(1 / each for each in seconds) if min(seconds) > 0 else 0.0


class Staleness:
    """Running figures of a run with asynchronous replicas."""

    def __init__(self, job: Job) -> None:
        self._bound = job.settings.data_parallel.max_staleness
        self._seconds = [array("d") for _ in range(job.replicas)]
        self._counts: list[Counter[int]] = [Counter() for _ in range(job.replicas)]
        self._held = [0.0] * job.replicas

    def add(self, steps: Sequence[Pushed]) -> None:
        """A step of every replica."""
        for replica, step in enumerate(steps):
            self._seconds[replica].append(step.seconds)
            self._counts[replica].update(step.staleness)
            self._held[replica] += step.held

    def summary(self) -> dict[str, Any]:
        """For summary.json, by replica. Step times leave out the first step where there is another one."""
        replicas = []
        for seconds, counts, held in zip(self._seconds, self._counts, self._held, strict=True):
            pushes = counts.total()
            replicas.append({
                "step_time": statistics.median(seconds[1:] or seconds) if seconds else None,
                "held_back": held / len(seconds) if seconds else None,
                "staleness": {
                    "mean": sum(value * count for value, count in counts.items()) / pushes if pushes else None,
                    "max": max(counts, default=None),
                    "histogram": {str(value): counts[value] for value in sorted(counts)},
                },
            })  # fmt: skip
        return {"mode": "async", "max_staleness": self._bound, "replicas": replicas}


def pushes_text(told: dict[str, Any]) -> str:
    """What must be known of such a run before its losses are compared with others."""
    replicas, bound = told["replicas"], told["max_staleness"]
    worst = max((each["staleness"]["max"] or 0 for each in replicas), default=0)
    said = (
        "This is not the synchronous optimisation: each replica's gradient is an update by itself, computed with "
        f"weights that are up to {counted(worst, 'update')} old, and results differ from run to run."
    )
    if bound is None:
        return f"{said} Replicas did not wait for each other."
    return f"{said} No replica began a step more than {bound} ahead of the slowest: for that it was held back."


def pace_rows(told: dict[str, Any]) -> Rows:
    """The pace of asynchronous replicas as a table, a row per replica."""
    rows = [["replica", "step ms", "steps/s", "held back ms", "staleness: mean", "max"]]
    for replica, each in enumerate(told["replicas"]):
        seconds, stale = each["step_time"], each["staleness"]
        rows.append([
            str(replica),
            "-" if seconds is None else f"{seconds * 1e3:.1f}",
            f"{1 / seconds:.2f}" if seconds else "-",
            "-" if each["held_back"] is None else f"{each['held_back'] * 1e3:.1f}",
            "-" if stale["mean"] is None else f"{stale['mean']:.2f}",
            "-" if stale["max"] is None else str(stale["max"]),
        ])  # fmt: skip
    return rows


def staleness_rows(told: dict[str, Any]) -> Rows:
    """How stale the pushes of each replica were as a table, a row per range that has any."""
    columns = []
    for each in told["replicas"]:
        counts: Counter[int] = Counter()
        for value, count in each["staleness"]["histogram"].items():
            counts[max(begin for begin in STALE if begin <= int(value))] += count
        columns.append(counts)
    rows = [["staleness", *(f"replica {replica}" for replica in range(len(columns)))]]
    for begin, after in zip(STALE, (*STALE[1:], None), strict=True):
        if any(counts[begin] for counts in columns):
            last = "" if after is None else after - 1
            name = str(begin) if last == begin else f"{begin}-{last}"
            rows.append([name, *(str(counts[begin]) for counts in columns)])
    return rows
