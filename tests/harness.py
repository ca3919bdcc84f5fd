"""Runs the engine in this process with its ranks as threads, and the plain process that it must equal."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.store import Checkpoint
from engine.job import Job
from engine.pipeline.batches.microbatch import passes, sizes
from engine.pipeline.dtypes import cast, in_precision
from engine.pipeline.losses import make_loss
from engine.pipeline.seeds import building, seed_for
from engine.prepare.prepare import prepare
from engine.settings import DataParallelSettings, Eval, PipelineSettings, Settings, Train
from engine.telemetry.records import Record, decode
from engine.training.build import DTYPES, build_optimizer, model_layers
from engine.training.samples.batches import Batches
from engine.training.samples.source import dataset
from engine.training.worker import Worker
from engine.transport import PeerError, Transport
from engine.transport.threads import ThreadHub

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAM = {"_target_": "torch.optim.Adam", "lr": 0.01}


def settings(
    schedule: str = "gpipe", ranks: int = 2, microbatches: int = 4, replicas: int = 1, **changes: Any
) -> Settings:
    """A small float64 run on four layers: 3 steps, 16 samples a step, no evaluation."""
    base = Settings(
        launch="threads",
        device="cpu",
        precision="fp64",
        threads_per_worker=1,
        timeout_s=20,
        schedule={"name": schedule},
        model={"_target_": "toys.mlp4", "loss": {"_target_": "toys.TokenLoss"}},
        partition={"name": "uniform"},
        data={"_target_": "toys.Tokens"},
        optimizer=SGD,
        pipeline=PipelineSettings(ranks, microbatches),
        data_parallel=DataParallelSettings(replicas),
        train=Train(steps=3, global_batch_size=16),
        eval=Eval(every=0),
        save="never",
    )
    train = {k: changes.pop(k) for k in list(changes) if k in Train.__dataclass_fields__}
    return replace(base, **{"train": replace(base.train, **train)} | changes)


class Ran:
    """A finished run: its workers by world rank, and all records in order of arrival."""

    def __init__(self, job: Job, workers: Mapping[int, Worker], records: list[Record]) -> None:
        self.job, self.workers, self.records = job, workers, records

    def state(self, replica: int = 0) -> dict[str, Tensor]:
        """Parameters and buffers of one replica, over all of its ranks."""
        own = [w for r, w in sorted(self.workers.items()) if r // self.job.ranks == replica]
        return {k: v for worker in own for stage in worker.stages.values() for k, v in stage.state_dict().items()}

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record.kind == kind]

    def losses(self) -> list[float]:
        """The logged loss of each step."""
        steps: dict[int, list[dict[str, Any]]] = {}
        for record in sorted(self.of("step"), key=lambda record: record.meta["rank"]):
            if record.meta["loss_sum"] is not None:
                steps.setdefault(record.meta["step"], []).append(record.meta)
        return [sum(m["loss_sum"] for m in ms) / sum(m["loss_count"] for m in ms) for _, ms in sorted(steps.items())]


Connect = Callable[[Job], Callable[[int], Transport]]  # job -> rank -> its transport


def run_threads(
    wanted: Settings,
    inspect: Callable[[Worker], None] | None = None,
    connect: Connect | None = None,
    resumed: Checkpoint | None = None,
) -> Ran:
    """Prepare and train with a thread per rank. The first exception of a rank that is no consequence
    of another's is raised here."""
    job = prepare(wanted, ".", ".", resumed)
    hub = ThreadHub(job.world, wanted.timeout_s)
    transport = hub.transport if connect is None else connect(job)
    workers: dict[int, Worker] = {}
    records: list[Record] = []
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            worker = Worker(job, rank, transport(rank), lambda data: records.append(decode(data)))
            workers[rank] = worker
            if inspect:
                inspect(worker)
            worker.run()
        except BaseException as error:
            errors.append(error)
            hub.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(job.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])
    return Ran(job, workers, records)


def plain(wanted: Settings, microbatched: bool) -> tuple[dict[str, Tensor], list[float]]:
    """One process, no engine: the same weights, samples and masks; final state and the loss of each step.

    `microbatched`: the batch goes through in the same micro-batches, one backward each, in order (bitwise equal where
    law 1 says so); else in one piece (equal to rounding), which is possible where no layer draws random numbers.
    """
    job = prepare(wanted, ".", ".")
    dtype = DTYPES[wanted.precision]
    layers: list[nn.Module] = []
    for index in range(len(job.layers)):
        with building(wanted.seed, index):
            layers.append(cast(model_layers(wanted.model)[index][1](), torch.device("cpu"), dtype))
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer, _ = build_optimizer(job, parameters)
    loss = make_loss(wanted.model["loss"])
    data = dataset(wanted.data, evaluation=False)
    batches = Batches(job.train_samples, wanted.train.global_batch_size, 1, wanted.seed, True)
    logged = []
    for step, indices in enumerate(batches.shares(0, batches.steps(wanted.train.steps, wanted.train.epochs))):
        x = torch.stack([data[i][0] for i in indices])
        x = x.to(in_precision(x.dtype, dtype))
        y = torch.stack([data[i][1] for i in indices])
        total = loss.count(y, None)
        sums = []
        pieces = (
            list(cut_in(wanted, len(indices), wanted.pipeline.microbatches))
            if microbatched
            else [(0, 0, 0, len(indices))]
        )
        for replica, microbatch, start, rows in pieces:
            value = x[start : start + rows].clone()
            for index, layer in enumerate(layers):
                seed = seed_for(wanted.seed, "draw", index, step, microbatch, replica)
                if job.layers[index].random:
                    torch.manual_seed(seed)
                value = layer(value)
            part = loss(value, y[start : start + rows])
            sums.append(float(part.detach()))
            (part / total).backward()
        if wanted.train.clip_norm is not None:
            power = wanted.train.clip_norm_type
            nn.utils.clip_grad_norm_(parameters, wanted.train.clip_norm, math.inf if power is None else power)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        logged.append(sum(sums) / total)
    names = [layer.name for layer in job.layers]
    state = {f"{n}.{k}": v for n, layer in zip(names, layers, strict=True) for k, v in layer.state_dict().items()}
    return state, logged


def cut_in(wanted: Settings, count: int, microbatches: int) -> Iterator[tuple[int, int, int, int]]:
    """(replica, micro-batch of the replica, first row of the global batch, rows)."""
    row = 0
    for replica, share in enumerate(sizes(count, wanted.data_parallel.replicas)):
        microbatch = 0
        for piece in passes(share, wanted.train.accumulate, microbatches, lambda m: m):
            for rows in piece:
                yield replica, microbatch, row, rows
                microbatch, row = microbatch + 1, row + rows


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        torch.testing.assert_close(
            value, b[key], rtol=tolerance, atol=tolerance * 1e-3, msg=lambda m, k=key: f"{k}: {m}"
        )
