"""costs.json: what a finished run has measured, in the form in which other configurations are predicted from it.

    {"version": 2, "steps": n, "threads": of a worker, "schedule": "1f1b", "options": {},
     "ranks": P, "replicas": R, "passes": A, "microbatches": M, "samples": of a step over all replicas,
     "rows": samples of a micro-batch (mean), "split": [first layer of each stage],
     "duration": [R][4][S], "spread": [n][4][17], "short": [{"rows": samples, "duration": [4][S]}, ...],
     "overhead": s, "delay": [2][S], "loaded": [W][2], "reduce": [S], "gather": [S], "count": s, "norm": [R],
     "step": [W], "reduced": bool, "normed": bool, "gathered": bool,
     "layers": [{"name", "forward": s, "activation_bytes", "parameter_bytes", "sends": [forward, backward] or null}]}

All times are seconds, and medians over `steps` whole traced steps looked at (`trace_budget.py`), without the run's
first. S stages, W world ranks, W = replica * P + pipeline rank. The four kinds are F, B, I, W; a kind that a stage did
not run is 0.

    duration   of a computation, over its micro-batches
    spread     of each step: its computations of a kind as parts of their stages' `duration`, from the smallest to the
               largest in 17 equal shares of the time that is usual for them all, each share's mean. So what is drawn
               from it adds up to what the step took, and a jolt of a short computation is not one of a long one.
    short      the same of steps that had fewer samples, whose micro-batches have another size
    overhead   for each computation what a rank spent in no name of its account: the interpreter between actions
    delay      a message under way from stage s to s + 1, and a gradient the other way; 0 where none was seen
    loaded, reduce, gather, count, norm, step    as in `observed.Observed`
    layers     `forward` of all micro-batches of a step; bytes of a micro-batch (`rows`, rounded up), and of weights.
               The loss is the last layer's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.account.bubble import Account
from engine.account.measure import repeated
from engine.account.records.gather import Step
from engine.account.replay.observed import Observed, durations
from engine.categories import NAMES
from engine.job import Job
from engine.plan.actions import COMPUTE, Op, Program
from engine.plan.dependencies import Flat
from engine.plan.timeline import COMPUTE_KINDS, Kind, Timeline

COSTS_NAME = "costs.json"
VERSION = 2
KEPT = 32  # steps
SHARES = 17

_Floats = npt.NDArray[np.float64]


class _Whole(NamedTuple):
    """A whole traced step."""

    observed: Observed
    other: int
    layers: _Floats
    reduced: bool
    normed: bool
    gathered: bool


class MeasuredCosts:
    """Collects what costs.json tells: the last whole traced steps of a run with a synchronous schedule."""

    def __init__(self, job: Job) -> None:
        self.threads: int | None = None  # of a worker, once one has told
        self._job = job
        self._program = repeated(job.compute, job.settings.train.accumulate)
        self._steps: deque[_Whole] = deque(maxlen=KEPT)
        self._short: dict[float, deque[_Floats]] = {}
        self._added = 0

    def add(self, step: Step, timeline: Timeline, account: Account, observed: Observed | None) -> None:
        """Take in a traced step and its spans; `observed` where every rank ran just its row of the program."""
        if observed is None or step.samples < self._samples:  # as many micro-batches may be smaller ones
            self._add_short(step, timeline)
            return
        if self._added == 1:
            self._steps.clear()  # the first step warms up
        self._added += 1
        other = int(account.table[:, NAMES.index("other")].sum())
        kinds = set(np.unique(timeline.kind).tolist())
        reduced = self._job.replicas > 1 or int(Kind.REDUCE) in kinds
        normed, gathered = (int(kind) in kinds for kind in (Kind.WAIT_NORM, Kind.GATHER))
        assert step.recorded is not None
        self._steps.append(_Whole(observed, other, step.recorded.layers, reduced, normed, gathered))

    def _add_short(self, step: Step, timeline: Timeline) -> None:
        """A step of one pass with fewer samples than configured, the same on every replica."""
        accumulate, replicas = self._job.settings.train.accumulate, self._job.replicas
        if accumulate > 1 or not 0 < step.samples < self._samples or step.samples % replicas:
            return
        rows = step.samples / (replicas * max(1, step.microbatches))
        found = np.zeros((len(COMPUTE), self._job.placement.stages))
        took = durations(timeline)
        for kind in COMPUTE_KINDS:
            for stage in range(found.shape[1]):
                here = (timeline.kind == kind) & (timeline.stage == stage)
                found[kind, stage] = np.median(took[here]) if here.any() else 0.0
        self._short.setdefault(rows, deque(maxlen=KEPT)).append(found)

    def content(self) -> dict[str, Any] | None:
        """The content of costs.json; None where no whole step was traced."""
        if not self._steps:
            return None
        job, settings = self._job, self._job.settings
        duration, spread = _computations(self._program, [whole.observed for whole in self._steps])
        return {
            "version": VERSION,
            "steps": len(self._steps),
            "threads": self.threads,
            "schedule": job.compute.name,
            "options": settings.schedule_options,
            "ranks": job.ranks,
            "replicas": job.replicas,
            "passes": settings.train.accumulate,
            "microbatches": job.compute.microbatches,
            "samples": self._samples,
            "rows": self._rows(),
            "split": list(job.split),
            "duration": duration,
            "spread": spread,
            "short": [
                {"rows": rows, "duration": (np.median(seen, axis=0) * 1e-9).tolist()}
                for rows, seen in sorted(self._short.items())
            ],
            "overhead": _median([whole.other for whole in self._steps]) / (len(self._program) * job.replicas),
            "delay": self._delays(),
            **{name: self._seconds(name) for name in ("loaded", "reduce", "gather", "count", "norm", "step")},
            **{name: any(getattr(whole, name) for whole in self._steps) for name in ("reduced", "normed", "gathered")},
            "layers": self._layers(),
        }

    @property
    def _samples(self) -> int:
        """Of a whole step."""
        return min(self._job.settings.train.global_batch_size, self._job.train_samples)

    def _rows(self) -> float:
        passes = self._job.settings.train.accumulate
        return self._samples / (self._job.replicas * passes * self._job.compute.microbatches)

    def _seconds(self, name: str) -> Any:
        """The median over steps of a field of `Observed`."""
        values = np.array([getattr(whole.observed, name) for whole in self._steps], dtype=np.float64)
        return (np.median(values, axis=0) * 1e-9).tolist()

    def _delays(self) -> list[list[float]]:
        """[2][S]: medians over all messages that crossed an edge, forward and backward."""
        flat, stages = Flat(self._program), self._job.placement.stages
        seen = np.array([whole.observed.delay for whole in self._steps], dtype=np.float64).reshape(-1, len(flat))
        crossed = seen.max(axis=0) > 0
        found = []
        for ops, step in (((Op.F,), 1), ((Op.B, Op.I), 0)):
            edges = [crossed & flat.having(*ops) & (flat.stage == stage + step) for stage in range(stages)]
            found.append([_median(seen[:, edge].ravel()) if edge.any() else 0.0 for edge in edges])
        return found

    def _layers(self) -> list[dict[str, Any]]:
        """Each layer; what comes after the last one, the loss, is added to it."""
        table = np.median([whole.layers for whole in self._steps], axis=0)
        count = len(self._job.layers)
        sums = np.zeros((count, 3))
        np.add.at(sums, np.minimum(table[:, 0].astype(np.int64), count - 1), table[:, 1:])
        return [
            {
                "name": layer.name,
                "forward": forward * 1e-9,
                "activation_bytes": round(activations),
                "parameter_bytes": round(parameters),
                "sends": layer.sends,
            }
            for layer, (forward, activations, parameters) in zip(self._job.layers, sums.tolist(), strict=True)
        ]


def _median(nanoseconds: Iterable[float]) -> float:
    """In seconds."""
    return float(np.median(np.fromiter(nanoseconds, dtype=np.float64))) * 1e-9


def _computations(program: Program, steps: Sequence[Observed]) -> tuple[list[Any], list[Any]]:
    """`duration` and `spread`."""
    flat = Flat(program)
    seen = np.array([step.duration for step in steps], dtype=np.float64)  # [steps, R, n]
    duration = np.zeros((seen.shape[1], len(COMPUTE), program.stages))
    relative, weight = np.ones_like(seen), np.zeros_like(seen)
    for op in COMPUTE:
        for stage in range(program.stages):
            here = flat.having(op) & (flat.stage == stage)
            if not here.any():
                continue
            usual = np.median(seen[:, :, here], axis=(0, 2))
            duration[:, op, stage] = usual
            weight[:, :, here] = usual[None, :, None]
            relative[:, :, here] = np.where(
                usual[None, :, None] > 0, seen[:, :, here] / np.maximum(1, usual)[:, None], 1
            )
    spread = np.ones((len(seen), len(COMPUTE), SHARES))
    for op in COMPUTE:
        if (here := flat.having(op)).any():
            steps_of = zip(relative[:, :, here], weight[:, :, here], strict=True)
            spread[:, op] = [shares(values.ravel(), weights.ravel()) for values, weights in steps_of]
    return (duration * 1e-9).tolist(), spread.tolist()


def shares(values: _Floats, weights: _Floats) -> _Floats:
    """The means of `values`, by size, over `SHARES` equal parts of their whole weight: [SHARES].

    Their mean is the weighted mean of the values. Where nothing has a weight each value has the same.
    """
    if not weights.any():
        weights = np.ones_like(values)
    order = np.argsort(values)
    reached = np.concatenate([[0.0], np.cumsum(weights[order])])
    summed = np.concatenate([[0.0], np.cumsum((values * weights)[order])])
    edges = np.interp(np.linspace(0, reached[-1], SHARES + 1), reached, summed)
    found: _Floats = np.diff(edges) * (SHARES / reached[-1])
    return found
