"""From the data set to what the executor is fed: a replica's share of a global batch, pass by pass.

The share of step t+1 is fetched in step t, when the rank first waits for a message: loading hides in the bubble, in
the same thread. What a data set draws does not depend on when that is (`source.loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.job import Job
from engine.pipeline.losses import Loss
from engine.pipeline.microbatch import Batches, offsets, passes, sizes, take
from engine.pipeline.row import Feed
from engine.pipeline.seeds import seeded
from engine.pipeline.stage import Draw
from engine.plan.timeline import Kind
from engine.telemetry.position import Place, locate
from engine.telemetry.trace import Tracer
from engine.training.build import DTYPES
from engine.training.delay import SlowDataset
from engine.training.source import dataset, loader, pair, to_device

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Share:
    """A replica's samples of one step: `pieces[p][m]` samples in micro-batch m of pass p. Empty for no samples.

    `given` is None but on the first stage's rank, `target` but on the last one's.
    """

    given: Any
    target: Any
    pieces: list[list[int]]

    @property
    def rows(self) -> int:
        return sum(map(sum, self.pieces))

    def target_of(self, start: int, rows: int) -> Any:
        return take(self.target, start, rows, self.rows)

    def input_of(self, start: int, rows: int) -> Any:
        return take(self.given, start, rows, self.rows)

    def feeds(self, step: int, replica: int, loss: Loss, count: Callable[[], float]) -> list[Feed]:
        """One feed per pass. Random draws count micro-batches through all passes of the step."""
        feeds: list[Feed] = []
        row = first = 0
        for piece in self.pieces:
            feeds.append(
                self._feed(piece, [row + at for at in offsets(piece)], Draw(step, first, replica), loss, count)
            )
            row += sum(piece)
            first += len(piece)
        return feeds

    def _feed(self, piece: list[int], starts: list[int], draw: Draw, loss: Loss, count: Callable[[], float]) -> Feed:
        return Feed(
            sizes=piece,
            input=lambda m: self.input_of(starts[m], piece[m]),
            target=lambda m: self.target_of(starts[m], piece[m]),
            draw=lambda m: draw._replace(microbatch=draw.microbatch + m),
            loss=loss,
            count=lambda m: count(),
        )


class Shares:
    """The shares of one replica, as far as a world rank needs them: inputs with the first stage, targets with the last.

    `legal(m)`: the largest number of micro-batches, at most m, for which there is a program. Ranks in the middle open
    no data set. Waiting for data is traced.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        device: torch.device,
        tracer: Tracer,
        legal: Callable[[int], int],
    ) -> None:
        settings = job.settings
        shuffle, drop = bool(settings.data.get("shuffle", True)), bool(settings.data.get("drop_last", False))
        self.batches = Batches(
            job.train_samples, settings.train.global_batch_size, job.replicas, settings.seed, shuffle, drop
        )
        self.steps = self.batches.steps(settings.train.steps, settings.train.epochs)
        self._job, self._device, self._tracer, self._legal = job, device, tracer, legal
        self._replica, self._rank = divmod(rank, job.ranks)
        stages = job.placement.stages_of(self._rank)
        self._first, self._last = 0 in stages, job.placement.stages - 1 in stages
        self._held: dict[int, Share] = {}
        self._data: Iterator[Any] = iter(())
        if self._first or self._last:
            data = dataset(settings.data, evaluation=False)
            assert data is not None
            if settings.delay.sample_ms:
                data = SlowDataset(data, settings.delay.sample_ms * 1e-3)
            self._data = loader(settings.data, data, self.batches, self._replica, self.steps, device)

    def take(self, step: int) -> Share:
        """The share of a step; steps are taken in order."""
        self.fetch(step)
        return self._held.pop(step)

    def fetch(self, step: int) -> None:
        """Load the share of a step ahead; nothing where it is loaded already or the run has no such step."""
        if step in self._held or step >= self.steps:
            return
        settings, pieces = self._job.settings, self.pieces(step)
        given = target = None
        if pieces and (self._first or self._last):
            start = self._tracer.mark()
            given, target = self._load(step)
            dtype = DTYPES[settings.precision]
            given = to_device(given, self._device, dtype) if self._first else None
            target = to_device(target, self._device, dtype) if self._last else None
            self._tracer.add(Kind.WAIT_DATA, -1, -1, start, self._tracer.mark())
        self._held[step] = Share(given, target, pieces)

    def pieces(self, step: int) -> list[list[int]]:
        """Samples in each micro-batch of each pass of a step."""
        rows = sizes(self.batches.count(step), self._job.replicas)[self._replica]
        return passes(rows, self._job.settings.train.accumulate, self._job.microbatches, self._legal)

    def _load(self, step: int) -> tuple[Any, Any]:
        try:
            return pair(next(self._data))
        except Exception as error:
            # It may happen in the middle of another step's action, which has nothing to do with it.
            locate(error, Place(action=f"loading the samples of step {step}"))
            raise

    def counted(self, step: int, share: Share, loss: Loss) -> float:
        """What those micro-batches of a step's share count whose loss is computed here; 0 on ranks that compute none.

        A loss that draws does it as in training, because what it counts may depend on that.
        """
        if not self._last:
            return 0.0
        total, row, last, number = 0.0, 0, self._job.placement.stages - 1, 0
        draws = self._job.random_loss, self._device, self._job.settings.seed, "draw", "loss", step
        for piece in share.pieces:
            placement = self._job.steps[len(piece)].placement if self._job.steps else self._job.placement
            for microbatch, rows in enumerate(piece):
                if placement.rank(last, microbatch) == self._rank:
                    with seeded(*draws, number, self._replica):
                        total += loss.count(share.target_of(row, rows), self._job.boundaries["train", rows][-1])
                row, number = row + rows, number + 1
        return total


class Count:
    """What a global batch counted (samples, or targets not ignored), agreed on before the first backward.

    Started before the step's first action, waited for where the first backward of the last stage needs it.
    """

    def __init__(
        self,
        local: float,
        start: Callable[[torch.Tensor], Callable[[], None]],
        tracer: Tracer,
        device: torch.device = CPU,  # where what `start` is given may live: NCCL adds what is on GPUs only
    ) -> None:
        self.local = local
        self._tracer = tracer
        self._total = torch.tensor(local, dtype=torch.float64, device=device)
        self._wait: Callable[[], None] | None = start(self._total)

    @staticmethod
    def alone(total: torch.Tensor) -> Callable[[], None]:
        """For `start`: nothing is summed."""
        return lambda: None

    def __call__(self) -> float:
        if self._wait is not None:
            start = self._tracer.mark()
            self._wait()
            self._wait = None
            self._tracer.add(Kind.WAIT_COUNT, -1, -1, start, self._tracer.mark())
        return float(self._total)
