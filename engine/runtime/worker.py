"""One rank's run, from the job to its last record.

    build ──> for each step: share ─> count ─> passes through the executor ─> record
                  └─ now and then, and at the end: evaluation

The same code runs in a process and in a thread; what differs is the transport and where `post` leads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.collectives.background import ReduceThread
from engine.collectives.buckets import Reducer
from engine.collectives.order import Order
from engine.collectives.watch import Watch
from engine.job import Job, MessageSpec
from engine.plan.timeline import Kind
from engine.records import encode
from engine.runtime.build import Wiring, build_optimizer, build_stages, device_of, norms_of
from engine.runtime.clock import Clocks
from engine.runtime.evaluate import Evaluation
from engine.runtime.executor import Executor
from engine.runtime.feed import Count, Share, Shares
from engine.runtime.links import Links
from engine.runtime.losses import make_loss
from engine.runtime.overlap import make_overlap
from engine.runtime.trace import Traced, tracer_for
from engine.runtime.transport import Transport
from engine.runtime.update import Update

Post = Callable[[bytes], None]


def run(job: Job, rank: int, transport: Transport, post: Post, clocks: Clocks | None = None) -> None:
    """Train as world rank `rank`; returns when all of its work is done. Exceptions say where (see `executor`)."""
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
        self.last_here = job.placement.stages - 1 in self.stages
        named = [item for s in sorted(self.stages) for item in self.stages[s].named_parameters()]
        parameters = [p for _, p in named]
        self.update = Update(parameters, *build_optimizer(job, parameters), settings.train.clip_norm)
        self.norms = norms_of(job, self.stages, self.wiring, self.device)
        self.reduce_thread = ReduceThread()
        self.reducers = self._reducers() if job.reduces else {}
        self.watches = [Watch([p for _, p in reducer.named], reducer.seen) for reducer in self.reducers.values()]
        self.loss = make_loss(settings.model.get("loss") or {})
        self.tracer = tracer_for(self.device)
        self.links = Links(transport, self.replica * job.ranks, self.device)
        self.executor = Executor(
            self.rank, self.stages, self.links, self.tracer, self._specs, self._reduce, self._step, self._closing,
            make_overlap(settings.model.get("overlap")),
        )  # fmt: skip
        self.shares = Shares(job, rank, self.device, self.tracer, self._legal)
        self.evaluation = Evaluation(job, rank, self.device, self.executor, self.stages, self.wiring, self.loss)
        self._unsent: tuple[dict[str, Any], Traced] | None = None
        self._norm: float | None = None
        self._local_norm = 0.0

    def _reducers(self) -> dict[int, Reducer]:
        """In the order of their REDUCE actions: the last stage first."""
        nbytes, order = self.job.settings.allreduce.bucket_bytes, Order()
        return {
            s: Reducer(self.stages[s].named_parameters(), self.wiring.reduction[s], nbytes, self.reduce_thread, order)
            for s in sorted(self.stages, reverse=True)
        }

    def run(self) -> None:
        """All steps, and the evaluations between and after them."""
        hello = {"rank": self.world_rank, "pid": os.getpid(), "device": str(self.device)}
        self.post(encode("ready", hello | {"threads": torch.get_num_threads()}))
        self._compare_clocks()
        try:
            self._train()
        finally:
            self._flush()
        self._compare_clocks()
        self.links.limit(0)
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
        for step in range(steps):
            self._one_step(step)
            done = step + 1
            if every != 0 and (done == steps or (every is not None and done % every == 0)):
                self._flush()
                for record in self.evaluation.run(done):
                    self.post(encode("evaluation", {"rank": self.world_rank} | record))
                self.tracer.pause_ended()

    # -- one step --------------------------------------------------------------------------------------------------

    def _one_step(self, step: int) -> None:
        trace = self.job.settings.trace.every
        self.tracer.on = trace > 0 and step % trace == 0
        self.executor.peak_in_flight = self.executor.peak_bytes = 0
        lr, sent, reduced = self.update.lr, self.links.bytes_sent, self._reduce_bytes
        share = self.shares.take(step)
        count = Count(self.shares.counted(share, self.loss), self.wiring.sum_counts, self.tracer)
        feeds = share.feeds(step, self.replica, self.loss, count)
        self.executor.when_idle = lambda: self._meanwhile(step)
        for feed in feeds[:-1]:
            self.executor.run(self.job.passes[len(feed.sizes)], feed)
        last = feeds[-1] if feeds else Share(None, None, [[]]).feeds(step, self.replica, self.loss, count)[0]
        self.executor.run(self.job.steps[len(last.sizes)], last)
        losses = [float(value) for feed in feeds for _, value in sorted(feed.losses.items())]
        traced = self.tracer.finish()
        self._flush()  # of the step before, where this one never waited
        record = {
            "rank": self.world_rank,
            "step": step,
            "epoch": step // self.shares.batches.per_epoch,
            "samples": self.shares.batches.count(step),
            "microbatches": max((len(piece) for piece in share.pieces), default=0),
            "lr": lr,
            "grad_norm": self._norm,
            "local_grad_norm": self._local_norm,
            "loss_sum": sum(losses) if self.last_here else None,
            "loss_count": count.local if self.last_here else None,
            "peak_in_flight": self.executor.peak_in_flight,
            "peak_activation_bytes": self.executor.peak_bytes,
            "bytes_sent_between_stages": self.links.bytes_sent - sent,
            "reduce_bytes_sent": self._reduce_bytes - reduced,
            "window": list(traced.window),
        }
        self._unsent = record, traced

    def _meanwhile(self, step: int) -> None:
        """What can be done while the rank waits: report the step before, load the next one's samples."""
        self._flush()
        self.shares.fetch(step + 1)

    def _flush(self) -> None:
        """Post the record that is held back."""
        if self._unsent is not None:
            (record, traced), self._unsent = self._unsent, None
            self.post(encode("step", record, {"spans": traced.spans, "pairs": traced.pairs}))

    # -- what the executor asks for --------------------------------------------------------------------------------

    def _legal(self, microbatches: int) -> int:
        """The largest number of micro-batches, at most so many, for which there is a program."""
        return max(m for m in self.job.steps if 0 < m <= microbatches)

    def _specs(self, mode: str, rows: int) -> Sequence[MessageSpec]:
        return self.job.boundaries[mode, rows]

    @property
    def _reduce_bytes(self) -> int:
        return sum(reducer.bytes_sent for reducer in self.reducers.values())

    def _closing(self, kind: Kind, stage: int, microbatch: int) -> None:
        """The last backward of a stage is next: a bucket of its gradients is reduced as soon as they are there."""
        reducer = self.reducers[stage]
        reducer.expect()
        if kind is Kind.W:  # what does not wait for it is there
            waiting = self.stages[stage].waiting(microbatch)
            for number, (_, parameter) in enumerate(reducer.named):
                if parameter not in waiting:
                    reducer.seen(number)

    def _reduce(self, stage: int) -> None:
        self.reducers[stage].launch()

    def _step(self) -> None:
        """STEP: the reductions are awaited, the gradients clipped, the parameters updated."""
        mark, add = self.tracer.mark, self.tracer.add
        for stage, reducer in self.reducers.items():
            start = mark()
            reducer.wait()
            add(Kind.WAIT_REDUCE, stage, -1, start, mark())
            for span in reducer.spans:
                self.tracer.add_host(Kind.REDUCE, stage, -1, *span)
        norm = None
        if self.update.clip_norm is not None:
            start = mark()
            norm = self.norms.total()
            add(Kind.WAIT_NORM, -1, -1, start, mark())
            self._norm = float(norm)
        start = mark()
        self._local_norm = self.norms.local()
        self.update.apply(norm)
        add(Kind.STEP, -1, -1, start, mark())
