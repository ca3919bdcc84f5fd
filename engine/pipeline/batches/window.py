"""Many updates without a drain, as an asynchronous schedule runs them: what its micro-batches are fed.

    updates of a window    | 0     | 1     | 2     | ...      a share of samples each: 1 micro-batch, or M
    micro-batches          | 0 1 2 | 3 4 5 | 6 7 8 | ...      counted through the window, as its program counts them

Samples are loaded when the first micro-batch of their update is, and forgotten at the update: memory is O(in flight),
however long the window is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.pipeline.batches.batch import GlobalCount, ReplicaBatch
from engine.pipeline.batches.microbatch import offsets
from engine.pipeline.losses import Loss
from engine.pipeline.messages.boundary import MessageTable
from engine.pipeline.row import Feed
from engine.pipeline.stage.stage import Draw
from engine.plan.programs import Updates


class Window:
    """The updates from step `first` on, on one rank; `sizes[k]`: samples in each micro-batch of the k-th.

    `take(step)` gives the samples of a step, `counted(step, batch)` starts the sum of what they count over replicas,
    `after(window)` is called behind each update.
    """

    def __init__(
        self,
        first: int,
        sizes: Sequence[list[int]],
        take: Callable[[int], ReplicaBatch],
        counted: Callable[[int, ReplicaBatch], GlobalCount],
        replica: int,
        loss: Loss,
        messages: MessageTable,
        after: Callable[[Window], None],
    ) -> None:
        self.first, self._take, self._counted, self._sizes = first, take, counted, sizes
        self.updates: Updates = tuple(map(len, self._sizes))
        self._places = [(k, j) for k, n in enumerate(self.updates) for j in range(n)]  # update and position there
        self._held: dict[int, tuple[ReplicaBatch, GlobalCount]] = {}
        self._taken = self._done = self._finished = 0  # updates whose samples were loaded; updates and their forwards
        self.feed = Feed(
            sizes=[rows for update in self._sizes for rows in update],
            input=lambda m: self._of(m)[0].input_of(*self._rows(m)),
            target=lambda m: self._of(m)[0].target_of(*self._rows(m)),
            draw=lambda m: Draw(first + self._places[m][0], self._places[m][1], replica),
            loss=loss,
            count=lambda m: self._of(m)[1](),
            messages=messages,
            updated=lambda: after(self),
        )

    @property
    def step(self) -> int:
        """The optimizer step that comes next, counted through the run."""
        return self.first + self._done

    def updated(self) -> tuple[int, list[float], float]:
        """Note that an update is done; its micro-batches, their loss sums, and what they counted on this rank."""
        size = self.updates[self._done]
        losses = [self.feed.losses.pop(m, None) for m in range(self._finished, self._finished + size)]
        held = self._held.pop(self._done, None)
        self._done, self._finished = self._done + 1, self._finished + size
        return size, [float(loss) for loss in losses if loss is not None], held[1].local if held else 0.0

    def load_ahead(self) -> None:
        """Load the samples of one more update, and start their count."""
        if self._taken < len(self.updates):
            step = self.first + self._taken
            batch = self._take(step)
            self._held[self._taken] = batch, self._counted(step, batch)
            self._taken += 1

    def _of(self, microbatch: int) -> tuple[ReplicaBatch, GlobalCount]:
        """The samples of a micro-batch's update, and their count."""
        while self._taken <= self._places[microbatch][0]:
            self.load_ahead()
        return self._held[self._places[microbatch][0]]

    def _rows(self, microbatch: int) -> tuple[int, int]:
        """Where a micro-batch's samples begin in its update's, and how many there are."""
        update, position = self._places[microbatch]
        return offsets(self._sizes[update])[position], self._sizes[update][position]
