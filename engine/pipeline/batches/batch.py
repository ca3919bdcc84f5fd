"""What the ends of a pipeline are fed in a step: a replica's share of the batch, and what the global batch counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.pipeline.batches.microbatch import offsets, take
from engine.pipeline.losses import Loss
from engine.pipeline.messages.boundary import MessageTable
from engine.pipeline.row import Feed
from engine.pipeline.stage.stage import Draw
from engine.plan.timeline import Kind
from engine.telemetry.trace import Tracer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ReplicaBatch:
    """A replica's samples of one step: `pieces[p][m]` samples in micro-batch m of pass p. Empty for no samples.

    `given` (the input) is looked at on the first stage's rank only, `target` on the last one's.
    """

    given: Any
    target: Any
    pieces: list[list[int]]

    @property
    def rows(self) -> int:
        """Samples in all passes."""
        return sum(map(sum, self.pieces))

    def target_of(self, start: int, rows: int) -> Any:
        """The targets of `rows` samples from `start` on, as tensors of their own."""
        return take(self.target, start, rows, self.rows)

    def input_of(self, start: int, rows: int) -> Any:
        """The inputs of `rows` samples from `start` on, as tensors of their own."""
        return take(self.given, start, rows, self.rows)

    def feeds(
        self, step: int, replica: int, loss: Loss, count: Callable[[], float], messages: MessageTable
    ) -> list[Feed]:
        """One feed per pass, at least one. Random draws count micro-batches through all passes of the step."""
        feeds: list[Feed] = []
        row = first = 0
        for piece in self.pieces or [[]]:
            starts = [row + at for at in offsets(piece)]
            feeds.append(self._feed(piece, starts, Draw(step, first, replica), loss, count, messages))
            row += sum(piece)
            first += len(piece)
        return feeds

    def evaluation(
        self, loss: Loss, messages: MessageTable, evaluated: Callable[[Any, Any, int], None], replica: int
    ) -> Feed:
        """The feed of an evaluation; the batch is one pass. `evaluated(output, target, micro-batch)`."""
        (piece,) = self.pieces
        feed = self._feed(piece, offsets(piece), Draw(0, 0, replica), loss, lambda: 0.0, messages)
        return replace(feed, evaluated=evaluated)

    def _feed(
        self,
        piece: list[int],
        starts: list[int],
        draw: Draw,
        loss: Loss,
        count: Callable[[], float],
        messages: MessageTable,
    ) -> Feed:
        return Feed(
            sizes=piece,
            input=lambda m: self.input_of(starts[m], piece[m]),
            target=lambda m: self.target_of(starts[m], piece[m]),
            draw=lambda m: draw._replace(microbatch=draw.microbatch + m),
            loss=loss,
            count=lambda m: count(),
            messages=messages,
        )


class GlobalCount:
    """What a global batch counted (samples, or targets not ignored), summed over replicas before the first backward.

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
        """A `start` for replicas that count by themselves: it sums nothing."""
        return lambda: None

    def __call__(self) -> float:
        """The sum over replicas; waits for it the first time."""
        if self._wait is not None:
            start = self._tracer.mark()
            self._wait()
            self._wait = None
            self._tracer.add(Kind.WAIT_COUNT, -1, -1, start, self._tracer.mark())
        return float(self._total)
