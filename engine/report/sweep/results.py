"""The jobs of a sweep as figures: what was swept, what each job was given of it, and what came of it.

Charts, tables and the front of the best are all made of a `Sweep`, and that of the rows in comparison.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.folder.rows import Row
from engine.tables import percent, size

UNSET = "(default)"  # the value of a key that other jobs were given, and this one was not
UNKNOWN = "?"  # the value of a key that a summary tells, where there is no summary
SCHEDULE, RANKS, MICROBATCHES = "schedule", "pipeline.ranks", "pipeline.microbatches"
REPLICAS, BATCH, SEED = "data_parallel.replicas", "train.global_batch_size", "seed"
# Keys that a summary tells, whoever set them.
_TOLD = {
    SCHEDULE: "schedule", RANKS: "ranks", MICROBATCHES: "microbatches", REPLICAS: "replicas",
    BATCH: "global_batch_size",
}  # fmt: skip
_WORDS = {RANKS: "ranks", MICROBATCHES: "micro-batches", REPLICAS: "replicas", BATCH: "global batch"}


@dataclass(frozen=True)
class Metric:
    """A figure of a job.

    `unit(largest)`: what figures are divided by on an axis, and its name. `praise`: what the best is called, where
    there is one; `more`: the largest is the best.
    """

    key: str
    name: str
    unit: Callable[[float], tuple[float, str]]
    text: Callable[[float], str]
    praise: str | None = None
    more: bool = False

    def best(self, known: Sequence[Result]) -> Result:
        """The best of the jobs by this figure; the first of equal ones."""
        return (max if self.more else min)(known, key=lambda result: result.figures[self.key])


def _time_unit(largest: float) -> tuple[float, str]:
    return (1.0, "s") if largest >= 10 else (1e-3, "ms")


def _byte_unit(largest: float) -> tuple[float, str]:
    return next(((10.0**p, u) for p, u in ((9, "GB"), (6, "MB"), (3, "kB")) if largest >= 10**p), (1.0, "bytes"))


def _plain(name: str) -> Callable[[float], tuple[float, str]]:
    return lambda _: (1.0, name)


def seconds_text(seconds: float) -> str:
    """Seconds with a unit: milliseconds below ten seconds."""
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


_SHARE = (_plain("of the step"), percent)
STEP = Metric("step", "step time", _time_unit, seconds_text, "shortest")
RATE = Metric("rate", "throughput", _plain("samples/s"), lambda v: f"{v:.1f} samples/s", "highest", more=True)
MEMORY = Metric("memory", "peak memory", _byte_unit, size, "least")
IDEAL = Metric("ideal", "ideal bubble", *_SHARE)
PREDICTED = Metric("predicted", "predicted bubble", *_SHARE, "smallest")
MEASURED = Metric("measured", "measured bubble", *_SHARE, "smallest")
COST = Metric("cost", "planned step cost", _plain("units of cost"), lambda v: f"{v:.6g}")
KEPT = Metric("kept", "planned activations", _plain("kept by a rank"), lambda v: f"{v:.4g}", "fewest")
METRICS = (STEP, RATE, MEMORY, IDEAL, PREDICTED, MEASURED, COST, KEPT)


@dataclass(frozen=True)
class Result:
    """One job of a sweep.

    `index`: which of the sweep's. `settings`: of each swept key the value; `given`: overrides that not all jobs share;
    `figures`: those that are known, by Metric.key; `reason`: why there are none, in a line.
    """

    index: int
    job: str
    status: str
    reason: str | None
    settings: Mapping[str, str]
    given: tuple[str, ...]
    figures: Mapping[str, float]
    row: Row

    @property
    def completed(self) -> bool:
        """Whether the job ran to its end."""
        return self.status == "completed"

    @property
    def words(self) -> str:
        """What was swept, in words."""
        return ", ".join(f"{word(key)} {value}" if key != SCHEDULE else value for key, value in self.settings.items())

    def number(self, key: str) -> int | None:
        """The whole number that the summary has under a key of _TOLD, but for the schedule; None where it has none."""
        value = self.row.get(_TOLD[key])
        return value if isinstance(value, int) else None


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep; `shared`: the overrides that all of them were given."""

    results: tuple[Result, ...]
    shared: tuple[str, ...]

    @cached_property
    def swept(self) -> dict[str, list[str]]:
        """Each swept key -> its values, numbers by size, words in the order in which they first occur."""
        return _values_of(self.results)

    @cached_property
    def varied(self) -> dict[str, list[str]]:
        """Each key in which completed jobs differ -> its values among them, in the order of `swept`."""
        return {key: values for key, values in _values_of(self.completed).items() if len(values) > 1}

    @property
    def completed(self) -> list[Result]:
        """The jobs that ran to their end, in order."""
        return [result for result in self.results if result.completed]

    def known(self, metric: Metric) -> list[Result]:
        """Completed jobs of which a metric is known."""
        return [result for result in self.completed if metric.key in result.figures]


def sweep_of(rows: Sequence[Row]) -> Sweep:
    """The sweep of these rows, which are jobs' summaries."""
    given = [list(row.get("overrides") or []) for row in rows]
    shared = [word for word in given[0] if all(word in own for own in given)] if len(given) > 1 else []
    values = [_values(row, own) for row, own in zip(rows, given, strict=True)]
    keys = list(dict.fromkeys(key for own in values for key in own))
    settings = [{key: own.get(key, UNKNOWN if key in _TOLD or not own else UNSET) for key in keys} for own in values]
    swept = _sorted([key for key in keys if len({own[key] for own in settings} - {UNKNOWN}) > 1])
    results = [
        Result(
            index,
            str(row.get("job", "?")),
            str(row.get("status", "unknown")),
            first_line(row["error"]) if row.get("error") else None,
            {key: own[key] for key in swept},
            tuple(w for w in words if w not in shared),
            _figures(row),
            row,
        )
        for index, (row, own, words) in enumerate(zip(rows, settings, given, strict=True))
    ]
    return Sweep(tuple(results), tuple(shared))


def _values(row: Row, overrides: Sequence[str]) -> dict[str, str]:
    """What a job was given, by key, and what its summary tells of it."""
    given: dict[str, str] = {}
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        given[key] = value
    told = {key: str(row[name]) for key, name in _TOLD.items() if row.get(name) is not None}
    return given | told


def _values_of(results: Sequence[Result]) -> dict[str, list[str]]:
    keys = results[0].settings if results else {}
    return {key: ordered(result.settings[key] for result in results) for key in keys}


def _sorted(keys: Sequence[str]) -> list[str]:
    return [*(key for key in _TOLD if key in keys), *(key for key in keys if key not in _TOLD)]


def _figures(row: Row) -> dict[str, float]:
    bubble, plan = row.get("bubble") or {}, row.get("plan") or {}
    memory = (row.get("memory") or {}).get("total") or []
    figures = {
        "step": (row.get("step_time") or {}).get("median"),
        "rate": row.get("samples_per_second"),
        "memory": max(memory, default=None),
        **{name: bubble.get(name) for name in ("ideal", "predicted", "measured")},
        "cost": plan.get("cost"),
        "kept": plan.get("peak"),
    }
    return {key: float(value) for key, value in figures.items() if value is not None}


def first_line(error: Any) -> str:
    """The first line of what a job failed with."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def word(key: str) -> str:
    """What a key is called on a page."""
    return _WORDS.get(key, key)


def number(value: str) -> float | None:
    """The finite number that a value is written as; None where it is none."""
    try:
        found = float(value)
    except ValueError:
        return None
    return found if abs(found) < float("inf") else None


def ordered(values: Any) -> list[str]:
    """Each value once: numbers by size, before words in the order in which they first occur."""
    once = list(dict.fromkeys(values))
    numbers = [(number(value), value) for value in once]
    return [value for _, value in sorted((n, v) for n, v in numbers if n is not None)] + [
        value for n, value in numbers if n is None
    ]
