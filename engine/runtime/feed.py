"""From a replica's share of a global batch to what the executor is fed, pass by pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.plan.timeline import Kind
from engine.runtime.executor import Feed
from engine.runtime.losses import Loss
from engine.runtime.microbatch import offsets, take
from engine.runtime.stage import Draw
from engine.runtime.trace import Tracer


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
            count=count,
        )


class Count:
    """What a global batch counted (samples, or targets not ignored), agreed on before the first backward.

    Started before the step's first action, waited for where the first backward of the last stage needs it.
    """

    def __init__(self, local: float, start: Callable[[torch.Tensor], Callable[[], None]], tracer: Tracer) -> None:
        self.local = local
        self._tracer = tracer
        self._total = torch.tensor(local, dtype=torch.float64)
        self._wait: Callable[[], None] | None = start(self._total)

    def __call__(self) -> float:
        if self._wait is not None:
            start = self._tracer.mark()
            self._wait()
            self._wait = None
            self._tracer.add(Kind.WAIT_COUNT, -1, -1, start, self._tracer.mark())
        return float(self._total)
