"""One rank's run, from the job to its last record.

    build ──> for each step: share ─> count ─> passes through the executor ─> record
                  └─ now and then, and at the end: evaluation

The same code runs in a process and in a thread; what differs is the transport and where `post` leads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.checkpoint.capture import restore
from engine.checkpoint.reader import Reader
from engine.gradients.servers.pushes import PushReducer
from engine.job import Job
from engine.pipeline.batches.window import Window
from engine.pipeline.executor import Observer
from engine.pipeline.lazy_dynamo import put_off
from engine.pipeline.losses import make_loss
from engine.pipeline.pipeline import Pipeline
from engine.pipeline.prepared import Prepared
from engine.pipeline.seeds import building
from engine.pipeline.stage.overlap import make_overlap
from engine.pipeline.tables import JobTables
from engine.pipeline.updates.updater import Updater, UpdateRules
from engine.ranks import Rank
from engine.telemetry.clock import Clocks
from engine.telemetry.records import LAYER_COLUMNS, encode
from engine.telemetry.trace import tracer_for
from engine.training.best import BestLoss
from engine.training.build import DTYPES, autocast_of, model_layers, optimizer_of, scheduler_of
from engine.training.checkpoints import Checkpoints
from engine.training.connections import connections
from engine.training.delay import slow_down
from engine.training.device import device_of
from engine.training.evaluate import Evaluation
from engine.training.kept import KeptWeights
from engine.training.memory import StaticMemory
from engine.training.replicas.asynchronous_sgd import AsynchronousSGD, PushUpdater
from engine.training.replicas.sharding import division_of
from engine.training.samples.inputs import BatchStream
from engine.transport import PeerError, Transport
from engine.weights.initial import InitialWeights

Post = Callable[[bytes], None]


def run(job: Job, rank: int, transport: Transport, post: Post, clocks: Clocks | None = None) -> None:
    """Train as world rank `rank`; returns when all of its work is done. Exceptions say where (see `executor`)."""
    put_off()
    with torch.cuda.stream(_own_stream(job, rank)):
        Worker(job, rank, transport, post, clocks).run()


def _own_stream(job: Job, rank: int) -> torch.cuda.Stream | None:
    """A stream for a rank that shares its GPU with others, so that they can compute at the same time."""
    device = device_of(job, rank)
    return torch.cuda.Stream(device) if device.type == "cuda" and job.settings.launch == "threads" else None


class Worker(Observer):
    """Everything one rank holds while it trains: its pipeline, its samples, and what it measures of both."""

    def __init__(self, job: Job, rank: int, transport: Transport, post: Post, clocks: Clocks | None = None) -> None:
        settings, pushing = job.settings, job.settings.data_parallel.asynchronous
        self.job, self.world_rank, self.post, self.clocks = job, rank, post, clocks
        _, self.replica, self.rank = Rank.of(rank, job.ranks)
        self.device = device_of(job, rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.tracer = tracer_for(self.device)
        self.pipeline = self._pipeline(transport, pushing)
        self._begin_with_weights()
        self.stages, self.links, self.executor = self.pipeline.stages, self.pipeline.links, self.pipeline.executor
        self.update, self.reducers = self.pipeline.updater.update, self.pipeline.updater.reducers
        for stage in self.stages.values():
            slow_down(stage, rank, settings.delay)
        self.last_here = job.placement.stages - 1 in self.stages
        self.inputs = BatchStream(job, rank, self.device, self.tracer, self._legal)
        self.evaluation = Evaluation(job, rank, self.pipeline)
        self.best = BestLoss(job, self.pipeline)
        self.kept = KeptWeights(job, rank, self.pipeline, transport)
        self.checkpoints = Checkpoints(
            job, rank, self.pipeline, self.inputs.batches.per_epoch, self.inputs.steps,
            lambda told: self.post(encode("checkpoint", told)),
        )  # fmt: skip
        self._stopped: int | None = None  # after so many steps, before the last, because the run was asked to end
        self._resume()
        self.async_sgd = AsynchronousSGD(job, self.reducers, self.inputs.steps) if pushing else None
        updates = [self.update] if self.async_sgd is None else self.async_sgd.updates
        divided = bool(self.pipeline.updater.sharded)
        self._memory: StaticMemory | None = StaticMemory(self.stages.values(), self.reducers.values(), updates, divided)
        self._unsent: Callable[[], None] | None = None
        self._load: Callable[[], None] | None = None  # the samples of the next step
        self._local_norm: Callable[[], float] = lambda: 0.0

    def _pipeline(self, transport: Transport, pushing: bool) -> Pipeline:
        """What runs a step; `pushing`: replicas are asynchronous."""
        job, settings = self.job, self.job.settings
        clip, dtype = settings.train, DTYPES[settings.precision]
        rules = UpdateRules(
            None if pushing else optimizer_of(settings), scheduler_of(settings), clip.clip_norm, clip.clip_norm_type,
            division_of(settings), settings.allreduce.bucket_bytes,
        )  # fmt: skip
        updater = partial(PushUpdater, job=job) if pushing else Updater
        prepared = Prepared(
            JobTables(job), connections(job), transport, rules, dtype, updater, self.tracer, self, independent=pushing
        )
        with building(settings.seed, "model"):
            named = settings.partition.get("split") or ()
            layers = model_layers(settings.model, job.example, named, self.device, dtype)
        return Pipeline(
            layers, make_loss(settings.model.get("loss") or {}), schedule=settings.schedule["name"],
            microbatches=settings.pipeline.microbatches, device=self.device, dtype=dtype,
            autocast=autocast_of(settings.precision, self.device), seed=settings.seed,
            overlap=make_overlap(settings.model.get("overlap")), prepared=prepared,
        )  # fmt: skip

    def _resume(self) -> None:
        """Go on from the checkpoint that the job names, where it does."""
        if self.job.resumed is not None:
            reader = Reader(Path(self.job.resumed))
            restore(self.pipeline, reader)
            self.best.loss = reader.manifest.best_loss

    def _begin_with_weights(self) -> None:
        """Begin with the weights that `init.weights` names, where it does."""
        init = self.job.settings.init
        if init.weights is None:
            return
        InitialWeights(init, self.job.start_dir).load(self.pipeline.stages.values())
        for reducer in self.pipeline.updater.reducers.values():
            if isinstance(reducer, PushReducer):
                reducer.renew_server()

    def run(self) -> None:
        """Run all steps, and the evaluations between and after them."""
        hello = {"rank": self.world_rank, "pid": os.getpid(), "device": str(self.device)}
        self.post(encode("ready", hello | {"threads": torch.get_num_threads()}))
        self._compare_clocks()
        try:
            if self.job.settings.mode == "evaluate":
                self._evaluate(0)
            else:
                if self.async_sgd is not None:
                    self.async_sgd.serve()
                self._train()
                if self.async_sgd is not None:
                    self.async_sgd.join()
        except PeerError:
            if self.async_sgd is not None:
                self.async_sgd.check()
            raise
        finally:
            if self.async_sgd is not None:
                self.async_sgd.close()
            self._flush()
        self._compare_clocks()
        self.inputs.close()
        self.pipeline.close()
        self.post(encode("done", {"rank": self.world_rank, "stopped": self._stopped}))

    def _compare_clocks(self) -> None:
        """At both ends of a run: two offsets give the drift between."""
        if self.clocks is not None and (offset := self.clocks.compare()):
            self.post(encode("clock", {"rank": self.world_rank} | offset._asdict()))

    def _train(self) -> None:
        steps, done = self.inputs.steps, self.job.start
        if self.job.settings.eval.at_start and done == 0:
            self._evaluate(0)
        self.inputs.fetch(done)
        self.tracer.pause_ended()
        counts = self.job.windows or [1] * (steps - done)  # how many steps until the pipeline drains, each time
        for count in counts:
            self.checkpoints.look_ahead(done + count)
            if self.job.windows:
                self._stream(done, count)
            else:
                self._one_step(done)
                if self.async_sgd is not None:
                    self.async_sgd.end(done)
            done += count
            self._between_steps(done)
            if done == self.checkpoints.stop_at and done < steps:
                self.checkpoints.finish()
                self._stopped = done
                return
        if self.job.start == steps:  # all of them were done before
            self._between_steps(done)
        self.checkpoints.finish()
        self.kept.ended(done)

    def _between_steps(self, done: int) -> None:
        """After `done` steps: evaluate, keep the best weights, make a checkpoint, each where it is due."""
        every, improved = self.job.settings.eval.every, False
        if every != 0 and (done == self.inputs.steps or (every is not None and done % every == 0)):
            improved = self.best.improves(self._evaluate(done))
            if improved:
                self.kept.improved(done, self.best.loss)
            self.tracer.pause_ended()
        self.checkpoints.poll()
        if self.checkpoints.due(done, improved):
            self._flush()
            self.checkpoints.make(done, self.best.loss)
            self.tracer.pause_ended()

    def _evaluate(self, done: int) -> list[dict[str, Any]]:
        """Evaluate the weights after `done` steps; the records of this rank."""
        self._flush()
        records = self.evaluation.run(done)
        for record in records:
            self.post(encode("evaluation", {"rank": self.world_rank} | record))
        return records

    # -- one step --------------------------------------------------------------------------------------------------

    def _one_step(self, step: int) -> None:
        self._begin(step, lambda: self.inputs.fetch(step + 1))
        batch = self.inputs.take(step)
        ran = self.pipeline.run(batch, step)
        self._end(step, max((len(piece) for piece in batch.pieces), default=0), ran.losses, ran.counted)

    def _begin(self, step: int, load: Callable[[], None]) -> None:
        """What is measured of a step starts here. `load`: the samples of the next one, while the rank waits anyway."""
        trace = self.job.settings.trace
        self.tracer.on = trace.every != 0 and step % trace.every < trace.consecutive
        self.executor.reset_peaks()
        if self.async_sgd is not None:
            self.async_sgd.begin(step)
        lr = self.update.lr if self.async_sgd is None else self.async_sgd.lr
        self._before = lr, self.links.bytes_sent, self.pipeline.updater.bytes_sent
        self._load = load

    def _end(self, step: int, microbatches: int, losses: list[float], counted: float) -> None:
        """Keep the record of a step until the rank waits next."""
        lr, sent, reduced = self._before
        traced = self.tracer.finish()
        self._flush()  # of the step before, where this one never waited
        versions = [stage.versions for _, stage in sorted(self.stages.items()) if stage.versions]
        record = {
            "rank": self.world_rank,
            "step": step,
            "epoch": step // self.inputs.batches.per_epoch,
            "samples": self.inputs.batches.count(step),
            "microbatches": microbatches,
            "lr": lr,
            "grad_norm": self.pipeline.updater.norm,
            "loss_sum": sum(losses) if self.last_here else None,
            "loss_count": counted if self.last_here else None,
            "peak_in_flight": self.executor.peak_in_flight,
            "peak_activation_bytes": self.executor.peak_bytes,
            "weight_versions": max((each.peak for each in versions), default=1),
            "bytes_sent_between_stages": self.links.bytes_sent - sent,
            "reduce_bytes_sent": self.pipeline.updater.bytes_sent - reduced,
            "rows": max((stage.largest for stage in self.stages.values()), default=0),
            "window": list(traced.window),
        }
        told = [each.pop_records() for each in versions]
        pushes = None if self.async_sgd is None else self.async_sgd.pop_records()
        norm = self._local_norm

        def send() -> None:
            arrays = {"spans": traced.spans(), "pairs": traced.pairs(), "layers": self._layers(traced.layers())}
            if told:
                arrays["versions"] = np.concatenate(told)
            if pushes is not None:
                arrays["pushes"] = pushes
            self.post(encode("step", record | {"local_grad_norm": norm()}, arrays))

        self._unsent = send

    def _layers(self, lasted: dict[int, int]) -> npt.NDArray[np.int64]:
        """A line for each layer here, where the step was traced: [n, 4].

        Its number (the one after the last is the loss), ns of its forwards, bytes that a micro-batch leaves there, and
        bytes of its parameters.
        """
        rows = []
        for stage in self.stages.values() if lasted else ():
            kept = stage.saved_by_layer()
            own = stage.parameter_bytes
            rows += [[n, lasted.get(n, 0), kept.get(n, 0), own.get(n, 0)] for n in sorted({*own, *kept})]
        return np.array(rows, dtype=np.int64).reshape(-1, LAYER_COLUMNS)

    def waiting(self) -> None:
        """What can be done while the rank waits: report the step before, load the next one's samples."""
        if self._load is not None:
            load, self._load = self._load, None
            self._flush()
            load()

    def _flush(self) -> None:
        """Post the record that is held back."""
        if self._unsent is not None:
            send, self._unsent = self._unsent, None
            send()

    # -- many steps without a drain --------------------------------------------------------------------------------

    def _stream(self, first: int, count: int) -> None:
        """The updates of an asynchronous schedule from step `first` to its next drain."""
        sizes = [[rows for piece in self.inputs.pieces(step) for rows in piece] for step in range(first, first + count)]
        window = self.pipeline.window(first, sizes, self.inputs.take, None, lambda each: self._updated(each))  # noqa: PLW0108  # tests watch it
        self._begin(first, window.load_ahead)
        self.pipeline.run_window(window)

    def _updated(self, window: Window) -> None:
        """An update of the window is done: its record, and on to the next."""
        step = window.step
        self._end(step, *window.updated())
        self._begin(step + 1, window.load_ahead)

    # -- what the pipeline tells and asks ---------------------------------------------------------------------------

    def before_update(self) -> None:
        """Note the norm and the bytes of the gradients, for the records."""
        if self._memory is not None:
            self._memory.before_update()
        self._local_norm = self.pipeline.updater.clip_norms.local()

    def after_update(self) -> None:
        """Report, once, what this rank keeps in memory from step to step."""
        if self._memory is not None:
            with nullcontext() if self.async_sgd is None else self.async_sgd.paused():
                self.post(encode("memory", {"rank": self.world_rank} | self._memory.after_update()))
            self._memory = None

    def _legal(self, microbatches: int) -> int:
        """The largest number of micro-batches, at most so many, for which there is a program."""
        if self.job.windows:
            return microbatches
        return max(m for m in self.job.steps if 0 < m <= microbatches)
