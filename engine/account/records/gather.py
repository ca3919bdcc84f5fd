"""From the records of single ranks to what a whole step, or a whole evaluation, was.

Averages are over what was counted, never over processes: a loss is known to the ranks that end a pipeline, so the
global loss is the sum of loss sums over the sum of counts, and a step's time is the mean over the ranks' windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.account.records.pushes import Pushed, pushed, together
from engine.job import Job
from engine.plan.timeline import Timeline
from engine.telemetry.records import LAYER_COLUMNS, SPAN_COLUMNS, VERSION_COLUMNS, Record

Meta = dict[str, Any]

AHEAD = 64  # steps under way of which everything is held


class Recorded:
    """The spans of a traced step, put together when they are first asked for. `len`: how many."""

    def __init__(self, records: Sequence[Record]) -> None:
        """World rank is the index of the record."""
        self._records = records

    def __len__(self) -> int:
        return sum(len(record.arrays["spans"]) for record in self._records)

    @cached_property
    def timeline(self) -> Timeline:
        """The spans of all ranks, each on its own clock."""
        spans = [record.arrays["spans"].reshape(-1, SPAN_COLUMNS) for record in self._records]
        kind, stage, microbatch, start, end = np.concatenate(spans).T
        rank = np.repeat(np.arange(len(spans)), [len(rows) for rows in spans])
        windows = np.array([record.meta["window"] for record in self._records], dtype=np.int64)
        narrow = [column.astype(np.int32) for column in (rank, kind, stage, microbatch)]
        before = np.cumsum([0, *map(len, spans[:-1])])
        tables = zip(self._records, before, strict=True)
        pairs = [record.arrays["pairs"].reshape(-1, 2) + first for record, first in tables]
        return Timeline(narrow[0], narrow[1], narrow[2], narrow[3], start, end, windows, np.concatenate(pairs))

    @cached_property
    def layers(self) -> npt.NDArray[np.float64]:
        """[n, 4]: a row per layer, columns as in telemetry.records, each the mean over the ranks that hold it."""
        rows = np.concatenate([record.arrays["layers"].reshape(-1, LAYER_COLUMNS) for record in self._records])
        numbers, place, count = np.unique(rows[:, 0], return_inverse=True, return_counts=True)
        sums = np.zeros((len(numbers), LAYER_COLUMNS))
        np.add.at(sums, place, rows)
        means: npt.NDArray[np.float64] = sums / count[:, None]
        return means


@dataclass(frozen=True)
class Step:
    """A step that every rank has finished. `loss` is None where nothing was scored; times in seconds.

    Lists of length P: peaks are the largest over the replicas, bytes their sum.
    """

    index: int
    samples: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    seconds: float
    peak_in_flight: list[int]
    peak_activation_bytes: list[int]
    bytes_sent_between_stages: list[int]
    reduce_bytes_sent: int  # the largest over all ranks
    bytes_sent: list[int]  # by world rank: to stages, and in reductions
    recorded: Recorded | None  # None where the step was not traced
    microbatches: int  # the most of any replica's passes
    rows: int  # samples of the largest micro-batch so far
    weight_versions: list[int] | None = None  # asynchronous schedules: the most kept so far on each rank
    replicas: tuple[Pushed, ...] = ()  # asynchronous replicas: the step of each
    staleness: list[int] | None = None  # and by stage how many updates older than this one the weights were, at most

    @property
    def samples_per_second(self) -> float:
        """Samples of the global batch per second of the step; 0 where it took no time."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


class Steps:
    """Holds the records of steps that are under way on some ranks; a rank is ahead of another by a few at most.

    Where replicas are asynchronous it can be by any number: of the steps beyond AHEAD only the figures are held.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._apart = job, job.settings.data_parallel.asynchronous
        self._pending: dict[int, dict[int, Record]] = {}

    def add(self, record: Record) -> Step | None:
        """Take in a rank's record; returns the step that it completes, if it does."""
        index = record.meta["step"]
        ranks = self._pending.setdefault(index, {})
        if self._apart and index > next(iter(self._pending)) + AHEAD:
            kept = {name: array if name == "pushes" else array[:0] for name, array in record.arrays.items()}
            record = record._replace(arrays=kept)
        ranks[record.meta["rank"]] = record
        if len(ranks) < self._job.world:
            return None
        del self._pending[index]
        return _combine(self._job, [ranks[rank] for rank in sorted(ranks)])


def _combine(job: Job, records: Sequence[Record]) -> Step:
    metas = [record.meta for record in records]

    def by_rank(key: str) -> list[list[int]]:
        return [[m[key] for m in metas[rank :: job.ranks]] for rank in range(job.ranks)]

    windows, replicas = [m["window"] for m in metas], pushed(job, records)
    mean = sum(end - start for start, end in windows) / len(windows) * 1e-9
    return Step(
        index=metas[0]["step"],
        samples=metas[0]["samples"],
        loss=ratio(metas, "loss_sum", "loss_count"),
        lr=next((m["lr"] for m in metas if m["lr"] is not None), None),
        grad_norm=_grad_norm(metas[: job.ranks]),
        seconds=together(replicas) if replicas else mean,
        peak_in_flight=[max(values) for values in by_rank("peak_in_flight")],
        peak_activation_bytes=[max(values) for values in by_rank("peak_activation_bytes")],
        bytes_sent_between_stages=[sum(values) for values in by_rank("bytes_sent_between_stages")],
        reduce_bytes_sent=max(m["reduce_bytes_sent"] for m in metas),
        bytes_sent=[m["bytes_sent_between_stages"] + m["reduce_bytes_sent"] for m in metas],
        recorded=_recorded(records, whole=bool(replicas)),
        replicas=replicas,
        microbatches=max(m["microbatches"] for m in metas),
        rows=max(m["rows"] for m in metas),
        **_versions(job, records),
    )


def _versions(job: Job, records: Sequence[Record]) -> dict[str, list[int]]:
    """What the ranks of an asynchronous schedule say of the weights that they read."""
    if not job.windows:
        return {}
    rows = np.concatenate([record.arrays["versions"].reshape(-1, VERSION_COLUMNS) for record in records])
    stage, _, forward, backward = rows.T
    assert (forward == backward).all(), "forward and backward of a micro-batch read one version"
    staleness = np.zeros(job.placement.stages, dtype=np.int64)
    np.maximum.at(staleness, stage, records[0].meta["step"] - forward)
    kept = [max(r.meta["weight_versions"] for r in records[rank :: job.ranks]) for rank in range(job.ranks)]
    return {"weight_versions": kept, "staleness": staleness.tolist()}


def ratio(metas: Sequence[Meta], above: str, below: str) -> float | None:
    """The sum of one figure over the sum of another, over ranks that know both; None where nothing was counted."""
    known = [m for m in metas if m[above] is not None and m[below] is not None]
    count = sum(m[below] for m in known)
    return float(sum(m[above] for m in known) / count) if count else None


def _grad_norm(metas: Sequence[Meta]) -> float | None:
    """The global norm where the run clips; else from the norms of one replica's ranks, where they tell them."""
    told = next((m["grad_norm"] for m in metas if m["grad_norm"] is not None), None)
    if told is not None:
        return float(told)
    local = [m["local_grad_norm"] for m in metas if m.get("local_grad_norm") is not None]
    return math.hypot(*local) if len(local) == len(metas) else None


def _recorded(records: Sequence[Record], whole: bool) -> Recorded | None:
    """None where nothing was traced, or `whole` and the spans of a rank are gone."""
    traced = [len(record.arrays["spans"]) > 0 for record in records]
    return Recorded(records) if any(traced) and (all(traced) or not whole) else None


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation found, over all replicas.

    `step`: optimizer steps done before it. `accuracy` is None where the model has none.
    """

    step: int
    samples: int
    loss: float | None
    accuracy: float | None

    def summary(self) -> Meta:
        """The content of summary.json's `evaluation`."""
        return {"step": self.step, "samples": self.samples, "loss": self.loss, "accuracy": self.accuracy}

    def __str__(self) -> str:
        loss = "not scored" if self.loss is None else f"loss {self.loss:.4g}"
        accuracy = "" if self.accuracy is None else f", accuracy {100 * self.accuracy:.1f} %"
        return f"evaluation after {self.step} steps: {loss}{accuracy}, {self.samples} samples"


class Evaluations:
    """Puts together the records of the ranks that computed a loss: one per replica."""

    def __init__(self, job: Job) -> None:
        self._expected = job.replicas
        self._pending: dict[int, list[Meta]] = {}

    def add(self, record: Record) -> EvaluationResult | None:
        """Take in a rank's record; returns the evaluation that it completes, if it does."""
        step = record.meta["step"]
        metas = self._pending.setdefault(step, [])
        metas.append(record.meta)
        if len(metas) < self._expected:
            return None
        del self._pending[step]
        return EvaluationResult(
            step,
            sum(m["samples"] for m in metas),
            ratio(metas, "loss_sum", "loss_count"),
            ratio(metas, "correct", "scored"),
        )
