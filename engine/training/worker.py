"""One rank's run, from the job to its last record.

    build ──> for each step: share ─> count ─> passes through the executor ─> record
                  └─ now and then, and at the end: evaluation

The same code runs in a process and in a thread; what differs is the transport and where `post` leads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.gradients.background import ReduceThread
from engine.gradients.buckets import Reducer
from engine.gradients.grad_hooks import GradHooks
from engine.gradients.order import Order
from engine.gradients.servers.pushes import PushReducer
from engine.gradients.shards import ShardedReducer
from engine.job import Job, MessageSpec
from engine.pipeline.executor import Executor
from engine.pipeline.lazy_dynamo import put_off
from engine.pipeline.links import Links
from engine.pipeline.losses import make_loss
from engine.pipeline.overlap import make_overlap
from engine.pipeline.versions import Versions
from engine.plan.timeline import Kind
from engine.plan.updates import read_versions
from engine.telemetry.clock import Clocks
from engine.telemetry.records import LAYER_COLUMNS, encode
from engine.telemetry.trace import tracer_for
from engine.training.asynchronous_sgd import AsynchronousSGD, push_reducer
from engine.training.build import Wiring, build_optimizer, build_stages, norms_of
from engine.training.delay import slow_down
from engine.training.device import device_of
from engine.training.evaluate import Evaluation
from engine.training.feed import Count, Share, Shares
from engine.training.memory import Held
from engine.training.sharding import division_of
from engine.training.update import Update
from engine.training.window import Window
from engine.transport import PeerError, Transport

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


class Worker:
    """Everything one rank holds while it trains."""

    def __init__(self, job: Job, rank: int, transport: Transport, post: Post, clocks: Clocks | None = None) -> None:
        settings = job.settings
        self.job, self.world_rank, self.post, self.clocks = job, rank, post, clocks
        self.replica, self.rank = divmod(rank, job.ranks)
        self.device = device_of(job, rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.wiring = Wiring(job, transport)
        self.stages = build_stages(job, self.rank, self.device)
        for stage in self.stages.values():
            slow_down(stage, rank, settings.delay)
        self.last_here = job.placement.stages - 1 in self.stages
        self.reduce_thread = ReduceThread()
        self.reducers = self._reducers() if job.reduces else {}
        self.sharded = {s: r for s, r in sorted(self.reducers.items()) if isinstance(r, ShardedReducer)}
        for s, sharded in self.sharded.items():
            self.stages[s].ready = partial(self._gathered, s, sharded)
        pieces = {s: sharded.pieces for s, sharded in self.sharded.items()}
        whole = [p for s in sorted(self.stages) for _, p in self.stages[s].named_parameters()]
        parameters = [piece.parameter for own in pieces.values() for piece in own] if pieces else whole
        pushing = {s: r for s, r in self.reducers.items() if isinstance(r, PushReducer)}
        optimizer, scheduler = (None, None) if pushing else build_optimizer(job, parameters)
        self.update = Update(parameters, optimizer, scheduler, settings.train.clip_norm)
        self.norms = norms_of(job, self.stages, pieces, self.wiring, self.device)
        self.watches = [GradHooks([p for _, p in reducer.named], reducer.seen) for reducer in self.reducers.values()]
        self.loss = make_loss(settings.model.get("loss") or {})
        self.tracer = tracer_for(self.device)
        for stage in self.stages.values():
            stage.tracer = self.tracer
        self.links = Links(transport, self.replica * job.ranks, self.device)
        self.executor = Executor(
            self.rank, self.stages, self.links, self.tracer, self._specs, self._reduce, self._step, self._gather,
            self._closing, make_overlap(settings.model.get("overlap")),
        )  # fmt: skip
        self.shares = Shares(job, rank, self.device, self.tracer, self._legal)
        self.evaluation = Evaluation(job, rank, self.device, self.executor, self.stages, self.wiring, self.loss)
        self.async_sgd = AsynchronousSGD(job, pushing, self.shares.steps) if pushing else None
        self.window: Window | None = None  # the present one of an asynchronous schedule
        for number, stage in self.stages.items() if job.windows else ():
            stage.versions = Versions(number, [layer.module for layer in stage.layers])
        updates = [self.update] if self.async_sgd is None else self.async_sgd.updates
        self._held: Held | None = Held(
            self.stages.values(), self.reducers.values(), updates, bool(self.sharded)
        )  # until it is told
        self._unsent: Callable[[], None] | None = None
        self._norm: float | None = None
        self._local_norm: Callable[[], float] = lambda: 0.0

    def _reducers(self) -> dict[int, Reducer]:
        """In the order of their REDUCE actions: the last stage first."""
        nbytes, order, wiring = self.job.settings.allreduce.bucket_bytes, Order(), self.wiring
        reducers: dict[int, Reducer] = {}
        division = division_of(self.job.settings)
        for s in sorted(self.stages, reverse=True):
            named, rest = self.stages[s].named_parameters(), (nbytes, self.reduce_thread, order)
            if division is not None and self.job.settings.data_parallel.asynchronous:
                reducers[s] = push_reducer(self.job, named, wiring.sharing[s], *rest, division)
            elif division is not None:
                reducers[s] = ShardedReducer(named, wiring.sharing[s], *rest, division)
            else:
                reducers[s] = Reducer(named, wiring.reduction[s], *rest)
        return reducers

    def run(self) -> None:
        """All steps, and the evaluations between and after them."""
        hello = {"rank": self.world_rank, "pid": os.getpid(), "device": str(self.device)}
        self.post(encode("ready", hello | {"threads": torch.get_num_threads()}))
        self._compare_clocks()
        try:
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
        self.links.limit(0)
        self._await_parameters()
        for watch in self.watches:
            watch.close()
        self.reduce_thread.close()
        self.post(encode("done", {"rank": self.world_rank}))

    def _compare_clocks(self) -> None:
        """At both ends of a run: two offsets give the drift between."""
        if self.clocks is not None and (offset := self.clocks.compare()):
            self.post(encode("clock", {"rank": self.world_rank} | offset._asdict()))

    def _train(self) -> None:
        every, steps = self.job.settings.eval.every, self.shares.steps
        self.shares.fetch(0)
        self.tracer.pause_ended()
        done = 0
        for count in self.job.windows or [1] * steps:  # how many steps until the pipeline drains
            if self.job.windows:
                self._stream(done, count)
            else:
                self._one_step(done)
                if self.async_sgd is not None:
                    self.async_sgd.end(done)
            done += count
            if every != 0 and (done == steps or (every is not None and done % every == 0)):
                self._flush()
                self._await_parameters()  # before anything else uses the channels that they come through
                for record in self.evaluation.run(done):
                    self.post(encode("evaluation", {"rank": self.world_rank} | record))
                self.tracer.pause_ended()

    # -- one step --------------------------------------------------------------------------------------------------

    def _one_step(self, step: int) -> None:
        self._begin(step, lambda: self.shares.fetch(step + 1))
        share = self.shares.take(step)
        count = self._count(step, share)
        feeds = share.feeds(step, self.replica, self.loss, count)
        for feed in feeds[:-1]:
            self.executor.run(self.job.passes[len(feed.sizes)], feed)
        last = feeds[-1] if feeds else Share(None, None, [[]]).feeds(step, self.replica, self.loss, count)[0]
        self.executor.run(self.job.steps[len(last.sizes)], last)
        losses = [float(value) for feed in feeds for _, value in sorted(feed.losses.items())]
        self._end(step, max((len(piece) for piece in share.pieces), default=0), losses, count.local)

    def _begin(self, step: int, load: Callable[[], None]) -> None:
        """What is measured of a step starts here. `load`: the samples of the next one, while the rank waits anyway."""
        trace = self.job.settings.trace
        self.tracer.on = step % trace.every < trace.consecutive
        self.executor.reset_peaks()
        if self.async_sgd is not None:
            self.async_sgd.begin(step)
        lr = self.update.lr if self.async_sgd is None else self.async_sgd.lr
        self._before = lr, self.links.bytes_sent, self._reduce_bytes
        self.executor.when_idle = lambda: self._meanwhile(load)

    def _end(self, step: int, microbatches: int, losses: list[float], counted: float) -> None:
        """Keep the record of a step until the rank waits next."""
        lr, sent, reduced = self._before
        traced = self.tracer.finish()
        self._flush()  # of the step before, where this one never waited
        versions = [stage.versions for _, stage in sorted(self.stages.items()) if stage.versions]
        record = {
            "rank": self.world_rank,
            "step": step,
            "epoch": step // self.shares.batches.per_epoch,
            "samples": self.shares.batches.count(step),
            "microbatches": microbatches,
            "lr": lr,
            "grad_norm": self._norm,
            "loss_sum": sum(losses) if self.last_here else None,
            "loss_count": counted if self.last_here else None,
            "peak_in_flight": self.executor.peak_in_flight,
            "peak_activation_bytes": self.executor.peak_bytes,
            "weight_versions": max((each.peak for each in versions), default=1),
            "bytes_sent_between_stages": self.links.bytes_sent - sent,
            "reduce_bytes_sent": self._reduce_bytes - reduced,
            "rows": max((stage.largest for stage in self.stages.values()), default=0),
            "window": list(traced.window),
        }
        told = [each.told() for each in versions]
        pushes = None if self.async_sgd is None else self.async_sgd.told()
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
        """Of each layer here, where the step was traced: its number, ns of its forwards, bytes that a micro-batch
        leaves there, bytes of its parameters; the number after the last is the loss: [n, 4]."""
        rows = []
        for stage in self.stages.values() if lasted else ():
            kept = stage.saved_by_layer()
            own = stage.parameter_bytes
            rows += [[n, lasted.get(n, 0), kept.get(n, 0), own.get(n, 0)] for n in sorted({*own, *kept})]
        return np.array(rows, dtype=np.int64).reshape(-1, LAYER_COLUMNS)

    def _meanwhile(self, load: Callable[[], None]) -> None:
        """What can be done while the rank waits: report the step before, load the next one's samples."""
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
        self.window = Window(first, count, self.shares, self.replica, self.loss, self._count)
        program = self.job.streams[self.window.updates]
        reads = read_versions(program)
        for index, stage in self.stages.items():
            assert stage.versions is not None
            stage.versions.begin(first, reads[index])
        self._begin(first, self.window.load_ahead)
        self.executor.run(program, self.window.feed)

    def _updated(self, window: Window) -> None:
        """An update of the window is done: its record, and on to the next."""
        step = window.step
        self._end(step, *window.updated())
        self._begin(step + 1, window.load_ahead)

    # -- what the executor asks for --------------------------------------------------------------------------------

    def _count(self, step: int, share: Share) -> Count:
        """What the global batch of a share counted, or where replicas are asynchronous the share: started here."""
        start = self.wiring.sum_counts if self.async_sgd is None else Count.alone
        return Count(self.shares.counted(step, share, self.loss), start, self.tracer, self.device)

    def _legal(self, microbatches: int) -> int:
        """The largest number of micro-batches, at most so many, for which there is a program."""
        if self.job.windows:
            return microbatches
        return max(m for m in self.job.steps if 0 < m <= microbatches)

    def _specs(self, mode: str, rows: int) -> Sequence[MessageSpec]:
        return self.job.boundaries[mode, rows]

    @property
    def _reduce_bytes(self) -> int:
        return sum(reducer.bytes_sent for reducer in self.reducers.values())

    def _closing(self, kind: Kind, stage: int, microbatch: int) -> None:
        """The last backward of a stage is next: a bucket of its gradients is reduced as soon as they are there."""
        if self._kept_back:
            return
        reducer = self.reducers[stage]
        reducer.expect()
        if kind is Kind.W:  # what does not wait for it is there
            waiting = self.stages[stage].waiting(microbatch)
            for number, (_, parameter) in enumerate(reducer.named):
                if parameter not in waiting:
                    reducer.seen(number)

    def _reduce(self, stage: int) -> None:
        if not self._kept_back:
            self.reducers[stage].launch()

    @property
    def _kept_back(self) -> bool:
        """Whether gradients leave at STEP only: asynchronous replicas push what is clipped already."""
        return self.async_sgd is not None and self.update.clip_norm is not None

    def _step(self, microbatch: int) -> None:
        """STEP: the reductions are awaited, the gradients clipped, the parameters updated.

        In an asynchronous schedule it names the last micro-batch of its update. Where replicas are asynchronous a
        server updates: the gradients are clipped, and what comes back for them is awaited.
        """
        mark, add = self.tracer.mark, self.tracer.add
        if self.async_sgd is None:
            self._await_reductions()
        norm = None
        if self.update.clip_norm is not None:
            start = mark()
            norm = self.norms.total()
            add(Kind.WAIT_NORM, -1, -1, start, mark())
            self._norm = float(norm)
        if self._held is not None:
            self._held.before_update()
        start = mark()
        self._local_norm = self.norms.local()
        with ExitStack() as stack:
            for each in self.stages.values():
                if each.versions is not None:
                    stack.enter_context(each.versions.updating())
            self.update.clip(norm)
            self.update.apply()
        add(Kind.STEP, -1, microbatch, start, mark())
        if self.async_sgd is not None:
            self._await_servers()
        if self._held is not None:
            with nullcontext() if self.async_sgd is None else self.async_sgd.paused():
                self.post(encode("memory", {"rank": self.world_rank} | self._held.after_update()))
            self._held = None
        if self.window is not None:
            self._updated(self.window)

    def _gather(self, stage: int) -> None:
        self.sharded[stage].gather()

    def _await_reductions(self) -> None:
        for stage, reducer in self.reducers.items():
            start = self.tracer.mark()
            reducer.wait()
            self.tracer.add(Kind.WAIT_REDUCE, stage, -1, start, self.tracer.mark())
            for ready, begun, ended in reducer.spans:
                self.tracer.add_host(Kind.QUEUED, stage, -1, ready, begun)
                self.tracer.add_host(Kind.REDUCE, stage, -1, begun, ended)

    def _await_servers(self) -> None:
        """The pushes are applied, and the weights for the next step are there."""
        if self._kept_back:
            for reducer in self.reducers.values():
                reducer.launch()
        self.executor.idle()
        self._await_reductions()

    def _await_parameters(self) -> None:
        for stage in self.stages.values():
            stage.ready()

    def _gathered(self, stage: int, sharded: ShardedReducer) -> None:
        """Before a stage is used: its parameters are whole."""
        start = self.tracer.mark()
        if sharded.gathered():
            self.tracer.add(Kind.WAIT_GATHER, stage, -1, start, self.tracer.mark())
            self.tracer.add_host(Kind.GATHER, stage, -1, *sharded.gather_span)
