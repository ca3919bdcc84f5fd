"""The table of hyper-parameters: what a run was, and what came of it, under the same keys for every run.

TensorBoard's table knows only the columns that it saw first, so every run declares all of them, with values of the same
types, whatever it has set. What came of a run is written once, when it is over, as scalars of their own: the last point
of a curve (the throughput of a short last batch, the bubble of one step) would be a poor summary of it.
"""

from __future__ import annotations

from typing import Any

from engine.job import Job

HParam = str | float | int | bool

METRICS = (
    "result/loss", "result/step_seconds", "result/samples_per_second",
    "result/bubble_ideal", "result/bubble_predicted", "result/bubble_measured",
    "result/peak_in_flight", "result/peak_activation_bytes", "result/peak_memory_bytes",
)  # fmt: skip


def hparams(job: Job, lr: float | None) -> dict[str, HParam]:
    """The hyper-parameters of a run, the same keys for every run. `lr`: that of the first step, where there was one."""
    settings = job.settings
    return {
        "schedule": job.compute.name,
        "ranks": job.ranks,
        "stages": job.placement.stages,
        "microbatches": settings.pipeline.microbatches,
        "replicas": job.replicas,
        "data_parallel": settings.data_parallel.mode,
        "model": _target(settings.model),
        "data": _target(settings.data),
        "optimizer": _target(settings.optimizer),
        "lr": lr or 0.0,
        "lr_scheduler": _target(settings.lr_scheduler or {}),
        "allreduce": settings.allreduce.name,
        "partition": str(settings.partition.get("name", "model")),
        "global_batch_size": settings.train.global_batch_size,
        "accumulate": settings.train.accumulate,
        "clip_norm": str(settings.train.clip_norm),
        "precision": settings.precision,
        "device": settings.device,
        "launch": settings.launch,
        "seed": str(settings.seed),
    }


def _target(group: dict[str, Any]) -> str:
    return str(group.get("_target_", "none"))


def results(summary: dict[str, Any]) -> dict[str, float | None]:
    """The results of a run by METRICS, from the content of summary.json: medians and means, the largest peaks."""
    bubble = summary["bubble"]
    values = (
        summary["loss"]["last"],
        summary["step_time"]["median"],
        summary["samples_per_second"],
        *(bubble[name] for name in ("ideal", "predicted", "measured")),
        max(summary["peak_in_flight"], default=None),
        max(summary["peak_activation_bytes"], default=None),
        max((summary["memory"] or {}).get("total", []), default=None),
    )
    return dict(zip(METRICS, values, strict=True))
