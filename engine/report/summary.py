"""summary.json: the figures of a run, kept up step by step. Times in seconds, sizes in bytes, both of one step.

Bytes and peaks are the largest of any step, so that a short last batch does not blur them. Step times leave out the
first step wherever there is another one.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Mapping
from typing import Any

from engine.account.measure import Bubbles
from engine.account.records.gather import EvaluationResult, Step
from engine.categories import NAMES
from engine.job import Job
from engine.ranks import Rank
from engine.report.earlier import Earlier

HELD = ("parameters", "gradients", "buckets", "optimizer_state")  # of a `memory` record


class Totals:
    """Running figures over completed steps; memory grows by two numbers a step.

    `earlier`: of a run that goes on. What it did before counts as steps and samples, and times are of this attempt.
    """

    def __init__(self, job: Job, earlier: Earlier | None = None) -> None:
        self._job, self._earlier = job, earlier
        self.steps = self.traced = self.samples = 0
        self.first_loss: float | None = None if earlier is None else earlier.first_loss
        self.last_loss: float | None = None
        self.last_index = 0
        self.evaluation: EvaluationResult | None = None
        self._seconds = array("d")
        self._samples = array("q")
        self._peaks = [0] * job.ranks
        self._peak_bytes = [0] * job.ranks
        self._sent = [0] * job.ranks
        self._moved = [0] * job.world
        self._reduced = 0
        self._checkpoints: dict[int, list[tuple[int, int, bool]]] = {}
        self._held: dict[int, Mapping[str, int]] = {}
        self._versions, self._staleness = [1] * job.ranks, [0] * job.placement.stages

    def add(self, step: Step) -> None:
        """Count one whole step, in the order of steps."""
        if self.steps == 0 and self._earlier is None:
            self.first_loss = step.loss
        self.last_loss, self.last_index = step.loss, step.index
        self.steps += 1
        self.traced += step.recorded is not None
        self.samples += step.samples
        self._seconds.append(step.seconds)
        self._samples.append(step.samples)
        self._peaks = list(map(max, self._peaks, step.peak_in_flight))
        self._peak_bytes = list(map(max, self._peak_bytes, step.peak_activation_bytes))
        self._sent = list(map(max, self._sent, step.bytes_sent_between_stages))
        self._moved = list(map(max, self._moved, step.bytes_sent))
        self._reduced = max(self._reduced, step.reduce_bytes_sent)
        self._versions = list(map(max, self._versions, step.weight_versions or self._versions))
        self._staleness = list(map(max, self._staleness, step.staleness or self._staleness))

    def add_checkpoint(self, meta: Mapping[str, Any]) -> None:
        """Take in a `checkpoint` record: what a rank copied, and whether it is on the disk."""
        told = self._checkpoints.setdefault(meta["step"], [])
        told.append((meta["copy_ns"], meta.get("nbytes", 0), meta["error"] is None))

    def add_memory(self, meta: Mapping[str, int]) -> None:
        """Take in a `memory` record: what a rank holds, in bytes."""
        self._held[meta["rank"]] = meta

    def summary(
        self,
        status: str,
        error: str | None,
        bubbles: Bubbles | None,
        not_finite_since: int | None = None,
        data_parallel: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The content of summary.json; what is not known is null. `not_finite_since`: the first step of such a loss.
        `data_parallel`: what is said of replicas.
        """
        job, seconds = self._job, self._timed(self._seconds)
        total, before = sum(seconds), self._earlier or Earlier(0, 0, None, None)
        content: dict[str, Any] = {"status": status} | ({"error": error} if error else {})
        return content | {
            "schedule": job.compute.name,
            "ranks": job.ranks,
            "stages": job.placement.stages,
            "microbatches": job.settings.pipeline.microbatches,
            "replicas": job.replicas,
            "global_batch_size": job.settings.train.global_batch_size,
            "steps": before.step + self.steps,
            "traced_steps": self.traced,
            "samples": before.samples + self.samples,
            "loss": {"first": self.first_loss, "last": self.last_loss, "not_finite_since": not_finite_since},
            "step_time": {
                "median": statistics.median(seconds) if seconds else None,
                "min": min(seconds, default=None),
                "max": max(seconds, default=None),
            },
            "samples_per_second": sum(self._timed(self._samples)) / total if total else None,
            "bubble": _bubble(job, bubbles),
            "waterfall": _waterfall(bubbles),
            "peak_in_flight": self._peaks,
            "peak_activation_bytes": self._peak_bytes,
            "memory": self._memory(),
            "evaluation": self.evaluation.summary() if self.evaluation else None,
            "checkpoint": self._checkpoint(),
            "allreduce": {
                "name": job.settings.allreduce.name,
                "bytes_sent_per_rank": self._reduced,
                "exposed": float(bubbles.seconds[:, NAMES.index("reduce")].mean()) if bubbles else None,
                "overlap": _overlap(job, bubbles),
            },
            "data_parallel": data_parallel,
            "bytes_sent_between_stages": self._sent,
            "bytes_sent_per_device": self._moved,
            "weight_versions": self._versions,
            "staleness": self._staleness,
            "asynchronous": _asynchronous(job, bubbles),
        }

    def _checkpoint(self) -> dict[str, Any] | None:
        """How many were made, their bytes, and the seconds that training waited for the copies: sums of the slowest."""
        if not self._checkpoints and self._earlier is None:
            return None
        made = [told for told in self._checkpoints.values() if len(told) == self._job.world]
        good = [told for told in made if all(well for *_, well in told)]
        return {
            "resumed_from": None if self._earlier is None else self._earlier.step,
            "made": len(good),
            "failed": len(made) - len(good),
            "bytes": max((sum(nbytes for _, nbytes, _ in told) for told in good), default=0),
            "waited": sum(max(copied for copied, *_ in told) for told in made) * 1e-9,
        }

    def _memory(self) -> dict[str, list[int]] | None:
        """By pipeline rank, the largest over the replicas; null until every rank has told.

        `parameters` counts all versions that were kept. `total` adds up what need not be largest at one moment.
        """
        ranks, world = self._job.ranks, self._job.world
        if len(self._held) < world:
            return None
        by_rank = [[self._held[each] for each in range(rank, world, ranks)] for rank in range(ranks)]
        found = {name: [max(meta[name] for meta in own) for own in by_rank] for name in HELD}
        found["parameters"] = [size * kept for size, kept in zip(found["parameters"], self._versions, strict=True)]
        found["activations"] = list(self._peak_bytes)
        return found | {"total": [sum(sizes) for sizes in zip(*found.values(), strict=True)]}

    @staticmethod
    def _timed(values: array[Any]) -> array[Any]:
        return values[1:] if len(values) > 1 else values


def _waterfall(bubbles: Bubbles | None) -> dict[str, Any] | None:
    """Means over `steps` whole traced steps: the bars, which add up to `measured`."""
    if bubbles is None or bubbles.waterfall is None:
        return None
    found = bubbles.waterfall
    return {"steps": found.steps, **found.bars, "measured": found.total, "replicas_alone": found.alone}


def _overlap(job: Job, bubbles: Bubbles | None) -> dict[str, Any] | None:
    """Means over traced steps; null where nothing is reduced, and for an asynchronous schedule."""
    if bubbles is None or bubbles.overlap is None:
        return None
    found, per_rank = bubbles.overlap, []
    for rank, share in enumerate(found.shares):
        _, replica, own = Rank.of(rank, job.ranks)
        parts = {"total": found.total[rank], "hideable": found.hideable[rank], "hidden": found.hidden[rank]}
        seconds: dict[str, Any] = {name: float(ns) / found.steps * 1e-9 for name, ns in parts.items()}
        per_rank.append({"rank": own, "replica": replica, **seconds, "share": share})
    return {"share": found.share, "per_rank": per_rank}


def _asynchronous(job: Job, bubbles: Bubbles | None) -> dict[str, Any] | None:
    """Null for a synchronous schedule. The bubbles are those of the steady state: `steady_updates` traced updates."""
    if not job.windows:
        return None
    return {
        "updates_between_drains": max(job.windows),
        "microbatches_per_update": job.microbatches,
        "steady_updates": bubbles.steps if bubbles and bubbles.steady else 0,
        "predicted_with_transfer": bubbles.with_transfer if bubbles else None,
        "predicted_with_variation": bubbles.explained if bubbles else None,
    }


def _bubble(job: Job, bubbles: Bubbles | None) -> dict[str, Any]:
    if bubbles is None:
        return {"ideal": None, "predicted": None, "measured": None, "per_rank": []}
    per_rank = []
    for rank, (seconds, bubble) in enumerate(zip(bubbles.seconds.tolist(), bubbles.per_rank.tolist(), strict=True)):
        _, replica, pipeline_rank = Rank.of(rank, job.ranks)
        where = dict(zip(NAMES, seconds, strict=True))
        per_rank.append({"rank": pipeline_rank, "replica": replica} | where | {"bubble": bubble})
    return {
        "ideal": bubbles.ideal,
        "predicted": bubbles.predicted,
        "measured": bubbles.measured,
        "per_rank": per_rank,
    }
