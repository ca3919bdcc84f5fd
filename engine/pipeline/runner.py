"""What one rank of a pipeline holds, and how it runs a step: the one way there is.

`engine.Pipeline` adds what a training loop of one's own needs; the engine's runs (`training/`) drive it through the
methods here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.pipeline.batches.batch import GlobalCount, ReplicaBatch
from engine.pipeline.batches.window import Window
from engine.pipeline.communicators import Communicators
from engine.pipeline.executor import Executor
from engine.pipeline.layers import GivenLayer
from engine.pipeline.losses import Loss
from engine.pipeline.messages.links import Links
from engine.pipeline.modes import evaluating
from engine.pipeline.prepared import Prepared
from engine.pipeline.seeds import seeded
from engine.pipeline.stage.overlap import Overlap
from engine.pipeline.stage.stage import Stage, StageLayer
from engine.pipeline.ties import share
from engine.pipeline.updates.updater import Numbering
from engine.plan.schedules import SCHEDULES
from engine.plan.updates import read_versions
from engine.ranks import replica_ranks

Context = Callable[[], AbstractContextManager[Any]]


class Ran(NamedTuple):
    """A step on this rank: loss sums of the micro-batches whose loss is computed here, and what they count."""

    losses: list[float]
    counted: float


class Runner:
    """The stages of one rank, its channels and its executor. `within` is the context of every forward."""

    def __init__(
        self,
        given: Sequence[GivenLayer],
        loss: Loss,
        prepared: Prepared,
        schedule: str,
        device: torch.device,
        dtype: torch.dtype | None,
        within: Context,
        seed: int,
        overlap: Overlap | None,
    ) -> None:
        self.loss, self.device, self._dtype, self._seed = loss, device, dtype, seed
        self.tables, self._prepared = prepared.tables, prepared
        placement, transport = self.tables.placement, prepared.transport
        self.communicators = Communicators(prepared.connections, transport)
        self.rank, self.replica = self.communicators.rank, self.communicators.replica
        self._asynchronous = SCHEDULES[schedule].stream is not None
        self.tracer = prepared.tracer
        self.stages = self._build(given, within)
        first = replica_ranks(self.replica, placement.ranks)[0]
        self.links = Links(transport, first, self.device, prepared.connections.label)
        numbering = Numbering(placement, self.tables.split, self.tables.trainable, prepared.dtype, self.tables.ties)
        self.updater = prepared.updater(
            self.stages, self.communicators, prepared.rules, numbering, self.device, self.tracer, prepared.observer
        )
        self.executor = Executor(
            self.rank, self.stages, self.links, self.tracer, self.updater, prepared.observer, overlap
        )
        self._last = placement.stages - 1
        self._replicated = transport.world > placement.ranks

    def _build(
        self, given: Sequence[GivenLayer], within: Callable[[], AbstractContextManager[Any]]
    ) -> dict[int, Stage]:
        tables, stages = self.tables, {}
        modules: dict[int, nn.Module] = {}
        ends = [*tables.split[1:], len(given)]
        for index in tables.placement.stages_of(self.rank):
            numbers = range(tables.split[index], ends[index])
            layers = [
                StageLayer(n, given[n].name, given[n].build(n, self.device, self._dtype, self._seed)) for n in numbers
            ]
            modules |= {layer.number: layer.module for layer in layers}
            stages[index] = Stage(
                index, layers, self.device, self._seed, tables.draws, within, self.tracer, self._asynchronous
            )
        share(tables.ties, modules, lambda n: given[n].build(n, self.device, self._dtype, self._seed))
        return stages

    def run(self, batch: ReplicaBatch, step: int) -> Ran:
        """One step of a synchronous schedule on this rank; random draws depend on the number `step`."""
        messages = self._messages(True, batch)
        self.updater.begin()
        count = self.count(step, batch)
        feeds = batch.feeds(step, self.replica, self.loss, count, messages)
        for feed in feeds[:-1]:
            self.executor.run(self.tables.passes[len(feed.sizes)], feed)
        self.executor.run(self.tables.steps[len(feeds[-1].sizes)], feeds[-1])
        return Ran([float(loss) for feed in feeds for _, loss in sorted(feed.losses.items())], count.local)

    def window(
        self,
        first: int,
        sizes: Sequence[list[int]],
        take: Callable[[int], ReplicaBatch],
        like: ReplicaBatch | None,
        after: Callable[[Window], None],
    ) -> Window:
        """What `run_window` runs; see `Window`. Batches are of the shapes of `like`."""
        messages = self.tables.messages(True, like)
        return Window(first, sizes, take, self.count, self.replica, self.loss, messages, after)

    def run_window(self, window: Window) -> None:
        """The updates of an asynchronous schedule from step `window.first` to its next drain."""
        program = self.tables.streams[window.updates]
        reads = read_versions(program)
        for index, stage in self.stages.items():
            assert stage.versions is not None
            stage.versions.begin(window.first, reads[index])
        self.executor.run(program, window.feed)

    def count(self, step: int, batch: ReplicaBatch) -> GlobalCount:
        """Start the sum of what the global batch of a step counts."""
        start = GlobalCount.alone if self._prepared.independent else self.communicators.sum_counts
        return GlobalCount(self.counted(step, batch), start, self.tracer, self.device)

    def counted(self, step: int, batch: ReplicaBatch) -> float:
        """What those micro-batches of a batch count whose loss is computed here; 0 on ranks that compute none.

        A loss that draws does it as in training, because what it counts may depend on that.
        """
        if self._last not in self.stages:
            return 0.0
        total, row, number, messages = 0.0, 0, 0, self.tables.messages(True, batch)
        draws = len(self.tables.names) in self.tables.draws, self.device, self._seed, "draw", "loss", step
        for piece in batch.pieces:
            placement = self.tables.placement if self._asynchronous else self.tables.steps[len(piece)].placement
            for microbatch, rows in enumerate(piece):
                if placement.rank(self._last, microbatch) == self.rank:
                    with seeded(*draws, number, self.replica):
                        total += self.loss.count(batch.target_of(row, rows), messages[rows][-1].spec)
                row, number = row + rows, number + 1
        return total

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around evaluations: evaluation mode, and every copy of a stage has the buffers of replica 0's first."""
        self.updater.all_ready()  # before anything else uses the channels that parameters come through
        own = self._borrow_buffers()
        try:
            with evaluating(layer.module for stage in self.stages.values() for layer in stage.layers):
                yield
        finally:
            for buffer, value in own:
                buffer.copy_(value)
        self.links.limit(0)

    def run_evaluation(self, batch: ReplicaBatch, loss: Loss, evaluated: Callable[[Any, Any, int], None]) -> None:
        """Forwards of a batch of one pass; `evaluated(output, target, micro-batch)` on the last stage's rank."""
        feed = batch.evaluation(loss, self.tables.messages(False, batch), evaluated, self.replica)
        self.executor.run(self.tables.evaluations[len(feed.sizes)], feed)

    def _borrow_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """(buffer, its own value) pairs to restore."""
        if not self._replicated:
            return []
        owns = self.tables.placement.first_copies(self.rank) if self.replica == 0 else []
        own = [(b, b.clone()) for s in sorted(self.stages) for _, b in self.stages[s].named_buffers()]
        for stage in sorted(self.stages):
            for _, buffer in self.stages[stage].named_buffers():
                flat = buffer.flatten().clone() if stage in owns else torch.zeros_like(buffer).flatten()
                # As bytes: with zeros they add up to themselves, whatever the dtype and the backend.
                self.communicators.reduction[stage].all_reduce(flat.view(torch.uint8))
                buffer.copy_(flat.view_as(buffer))
        return own

    def _messages(self, training: bool, batch: ReplicaBatch) -> Any:
        """The table of a batch's messages, complete for its micro-batches: which layers draw is then known."""
        messages = self.tables.messages(training, batch)
        for rows in {rows for piece in batch.pieces for rows in piece}:
            messages[rows]
        return messages


def forward_context(autocast: torch.dtype | Context | None, device: torch.device) -> Context:
    """The context of every forward, from a dtype of autocast or as it is given."""
    if isinstance(autocast, torch.dtype):
        return lambda: torch.autocast(device.type, autocast)
    return autocast or nullcontext
