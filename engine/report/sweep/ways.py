"""Plain, data-parallel, model-parallel: what a device has to take, move and hold in each way to train, as measured.

plain            one device
data-parallel    replicas: each has the whole model and a share of the samples; gradients are exchanged
model-parallel   ranks: each has a part of the model and sees all samples; activations are exchanged
both             replicas of a pipeline
"""

from __future__ import annotations

from typing import Any

from engine.report.sweep.results import BATCH, RANKS, REPLICAS, STEP, Result, Sweep
from engine.tables import size

WAYS = ("plain", "data-parallel", "model-parallel", "both")
HEAD = [
    "way", "job", "devices", "samples per device", "step ms", "samples/s", "sent per device", "of it in reductions",
    "parameters", "gradients", "optimizer state", "activations", "held in all", "load, max / mean",
]  # fmt: skip
NOTE = (
    "Of one step, on the device that has most of it. Gradients with the buckets that they are reduced in. Load: "
    "computing time of the busiest device over the mean."
)


def way_of(result: Result) -> str | None:
    """Which of WAYS a job trained in; None where it does not tell its sizes."""
    ranks, replicas = result.number(RANKS), result.number(REPLICAS)
    if ranks is None or replicas is None:
        return None
    return WAYS[(replicas > 1) + 2 * (ranks > 1)]


def way_rows(sweep: Sweep) -> list[list[str]]:
    """HEAD, and a line for every job that trained, by its way; nothing where all trained in the same way."""
    jobs = [(way, result) for result in sweep.known(STEP) if (way := way_of(result)) is not None]
    if len({way for way, _ in jobs}) < 2:
        return []
    return [HEAD, *(_line(way, result) for way, result in sorted(jobs, key=lambda pair: WAYS.index(pair[0])))]


def _line(way: str, result: Result) -> list[str]:
    row = result.row
    ranks, replicas = result.number(RANKS) or 1, result.number(REPLICAS) or 1
    memory = row.get("memory")
    batch = result.number(BATCH)
    reduced = (row.get("allreduce") or {}).get("bytes_sent_per_rank")
    held = ["-"] * 5
    if memory:
        gradients = [sum(pair) for pair in zip(memory["gradients"], memory["buckets"], strict=True)]
        kept = (memory["parameters"], gradients, memory["optimizer_state"], memory["activations"], memory["total"])
        held = [size(max(values)) for values in kept]
    figures = (result.figures.get("step", 0) * 1e3, result.figures.get("rate"))
    return [
        way, result.job, str(ranks * replicas),
        "-" if batch is None else f"{batch / replicas:g}",
        *("-" if value is None else f"{value:.1f}" for value in figures),
        _bytes(max(row.get("bytes_sent_per_device") or [], default=None)), _bytes(reduced),
        *held, _balance(row),
    ]  # fmt: skip


def _bytes(value: Any) -> str:
    return "-" if value is None else size(value)


def _balance(row: Any) -> str:
    times = [rank["compute"] for rank in (row.get("bubble") or {}).get("per_rank") or []]
    mean = sum(times) / len(times) if times else 0
    return f"{max(times) / mean:.2f}" if mean else "-"
