"""Jobs without workers, and the records that workers would send: simulated steps turned into nanoseconds."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.job import Job, Layer
from engine.plan.actions import Program
from engine.plan.schedules import build
from engine.plan.simulate import Costs, simulate
from engine.plan.timeline import Kind, Span, Timeline
from engine.report.recorder import Recorder
from engine.settings import DataParallelSettings, PipelineSettings, Settings, Train
from engine.telemetry.records import Record, decode, encode

MS = 1_000_000


def job(
    schedule: str = "gpipe", ranks: int = 2, microbatches: int = 4, replicas: int = 1, train: Train | None = None
) -> Job:
    """A job of one layer per stage. Nothing that only a worker needs is in it."""
    program = build(schedule, ranks, microbatches)
    settings = Settings(
        schedule={"name": schedule},
        model={"_target_": "models.mlp", "loss": {}},
        data={"_target_": "models.data.digits"},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
        pipeline=PipelineSettings(ranks, microbatches),
        data_parallel=DataParallelSettings(replicas),
        train=train or Train(steps=5, global_batch_size=64),
    )
    layers = tuple(Layer(f"block{i}", 10 * (i + 1), 1, False) for i in range(program.stages))
    split = tuple(range(program.stages))
    return Job(settings, program.placement, layers, split, 640, 100, program, {}, {}, {})


def costs(program: Program, forward: int = 2 * MS, backward: int = 4 * MS, slow: int | None = None) -> np.ndarray:
    """Durations [4, S, M] in ns; `slow` is a stage that takes three times as long."""
    each = np.zeros((4, program.stages, program.microbatches))
    each[0], each[1] = forward, backward
    if slow is not None:
        each[:, slow] *= 3
    return each


def spans_of(program: Program, durations: np.ndarray, transfer: int = 0, start: int = 0) -> list[Span]:
    """What the ranks of one replica would record: computations, waits for messages, sends. Integer nanoseconds."""
    simulated = simulate(program, Costs(durations, np.full(program.stages, float(transfer))))
    spans: list[Span] = []
    clock = [start] * program.ranks
    for span in sorted(simulated, key=lambda s: (s.start, s.end)):
        kind, begin, end = Kind(span.kind), start + round(span.start), start + round(span.end)
        forward = kind is Kind.F
        source = span.stage + (-1 if forward else 1)
        if 0 <= source < program.stages and program.placement.rank(source, span.microbatch) != span.rank:
            wait = Kind.WAIT_F if forward else Kind.WAIT_B
            spans.append(Span(span.rank, wait, span.stage, span.microbatch, clock[span.rank], begin))
        spans.append(span._replace(start=begin, end=end))
        target = span.stage + (1 if forward else -1)
        if 0 <= target < program.stages and program.placement.rank(target, span.microbatch) != span.rank:
            send = Kind.SEND_F if forward else Kind.SEND_B
            spans.append(Span(span.rank, send, span.stage, span.microbatch, end, end))
        clock[span.rank] = end
    return spans


def measured(
    program: Program, durations: np.ndarray, replicas: int = 1, transfer: int = 0, step: int = 0, start: int = 0
) -> Timeline:
    """One step of all replicas, which ends on every rank at once with `step` ns of optimizer."""
    spans: list[Span] = []
    own = spans_of(program, durations, transfer, start)
    last = max(int(span.end) for span in own)
    for replica in range(replicas):
        first = replica * program.ranks
        spans += [span._replace(rank=first + span.rank) for span in own]
        if step:
            spans += [Span(first + rank, Kind.STEP, rank, -1, last, last + step) for rank in range(program.ranks)]
    return Timeline.of(spans, [[start, last + step]] * (replicas * program.ranks), measured=True)


def step_records(
    of: Job,
    step: int = 0,
    timeline: Timeline | None = None,
    losses: Sequence[tuple[float, float]] = ((6.0, 4.0),),
    seconds: float = 1.0,
    **changes: Any,
) -> list[Record]:
    """A step's records in the order of the ranks, through bytes. `losses`: (sum, count) per replica.

    Without a timeline the step was not traced and its windows last `seconds`.
    """
    records = []
    for rank in range(of.world):
        replica, own = divmod(rank, of.ranks)
        last = own == of.ranks - 1
        loss = losses[replica % len(losses)] if last else (None, None)
        window = [int(1e9 * seconds * step), int(1e9 * seconds * (step + 1))]
        spans, pairs = np.zeros((0, 5), dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
        if timeline is not None:
            window = timeline.windows[rank].tolist()
            here = timeline.rank == rank
            columns = (timeline.kind, timeline.stage, timeline.microbatch, timeline.start, timeline.end)
            spans = np.stack([column[here].astype(np.int64) for column in columns], axis=1)
        meta = {
            "rank": rank, "step": step, "epoch": 0, "samples": 64, "microbatches": of.compute.microbatches,
            "lr": 0.1, "grad_norm": None, "loss_sum": loss[0], "loss_count": loss[1], "peak_in_flight": of.ranks - own,
            "peak_activation_bytes": 100 * (own + 1), "bytes_sent_between_stages": 1000 * (own + 1),
            "reduce_bytes_sent": 10 * rank, "window": window, "rows": 64 // (of.replicas * of.compute.microbatches),
        }  # fmt: skip
        arrays = {"spans": spans, "pairs": pairs, "layers": layers_of(of, own, timeline is not None)}
        records.append(decode(encode("step", meta | changes, arrays)))
    return records


def memory_records(of: Job) -> list[Record]:
    """What each rank keeps, in bytes: 1000, 500, 0 and 2000 times its world rank + 1."""
    sizes = {"parameters": 1000, "gradients": 500, "buckets": 0, "optimizer_state": 2000}
    metas = [{"rank": rank} | {name: size * (rank + 1) for name, size in sizes.items()} for rank in range(of.world)]
    return [decode(encode("memory", meta)) for meta in metas]


def layers_of(of: Job, rank: int, traced: bool) -> np.ndarray:
    """What a rank says of its layers: each forward 1 ms, 1000 bytes left, 4 bytes per parameter; no loss."""
    ends = [*of.split[1:], len(of.layers)]
    own = [n for s in of.placement.stages_of(rank) for n in range(of.split[s], ends[s])] if traced else []
    return np.array([[n, MS, 1000, 4 * of.layers[n].parameters] for n in own], dtype=np.int64).reshape(-1, 4)


def traced_run(recorder: Recorder, steps: int, durations: np.ndarray | None = None, transfer: int = 0) -> None:
    """Feed `steps` whole traced steps."""
    of, start = recorder.job, 0
    for record in memory_records(of):
        recorder(record)
    durations = costs(of.compute) if durations is None else durations
    for step in range(steps):
        timeline = measured(of.compute, durations, of.replicas, transfer, step=MS, start=start)
        start = int(timeline.windows.max())
        for record in step_records(of, step, timeline, losses=[(8.0 - step, 4.0)]):
            recorder(record)


def recorder(of: Job, folder: Path, **options: Any) -> tuple[Recorder, io.StringIO]:
    """A recorder and what it prints."""
    console = io.StringIO()
    return Recorder(of, folder, console=console, **options), console


def with_train(of: Job, **changes: Any) -> Job:
    return replace(of, settings=replace(of.settings, train=replace(of.settings.train, **changes)))


def log(message: str, rank: int | None = 0, level: int = logging.INFO) -> Record:
    return Record("log", {"rank": rank, "level": level, "logger": "a.b", "message": message}, {})
