"""An asynchronous run between two drains: its updates, what its micro-batches are fed, and what each update says.

    updates of a window    | 0     | 1     | 2     | ...      a share of samples each: 1 micro-batch, or M
    micro-batches          | 0 1 2 | 3 4 5 | 6 7 8 | ...      counted through the window, as its program counts them

Samples are loaded when the first micro-batch of their update is, and forgotten at the update: memory is O(in flight),
however long the window is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.pipeline.losses import Loss
from engine.pipeline.microbatch import Batches, offsets, sizes
from engine.pipeline.row import Feed
from engine.pipeline.stage import Draw
from engine.plan.actions import Program
from engine.plan.lowering import lower
from engine.plan.schedules import SCHEDULES
from engine.plan.verify import verify
from engine.settings import Settings
from engine.training.inputs import Count, Share, Shares

MOST_PAIRS = 2**20  # of a rank and a micro-batch in one window: its program is proven as a whole
Updates = tuple[int, ...]


def window_lengths(steps: int, every: int | None) -> tuple[int, ...]:
    """How many updates lie between the drains of a run of `steps`: it drains for an evaluation, and at the end."""
    length = min(every or steps, steps)
    full, rest = divmod(steps, length)
    return (length,) * full + ((rest,) if rest else ())


def updates_of(batches: Batches, replica: int, first: int, count: int, most: int) -> Updates:
    """Micro-batches of each update from step `first` on: `most`, or as many as there are samples."""
    counts = (batches.count(step) for step in range(first, first + count))
    return tuple(min(most, sizes(samples, batches.replicas)[replica]) for samples in counts)


def stream_programs(settings: Settings, batches: Batches, windows: Sequence[int]) -> dict[Updates, Program]:
    """The lowered and verified program of every window that a replica can have. The first one's comes first.

    Raises ValueError where a window is too long, and where a replica has no sample in some update.
    """
    most = SCHEDULES[settings.schedule["name"]].per_update(settings.pipeline.microbatches)
    programs: dict[Updates, Program] = {}
    for first, count in zip(np.cumsum([0, *windows]).tolist(), windows, strict=False):
        for replica in range(batches.replicas):
            updates = updates_of(batches, replica, first, count, most)
            if updates not in programs:
                _check(settings, updates)
                programs[updates] = lower(stream_program(settings, updates), reduce=batches.replicas > 1, step=True)
                verify(programs[updates])
    return programs


def stream_program(settings: Settings, updates: Updates) -> Program:
    """What the configured asynchronous schedule does with so many micro-batches in each update."""
    stream = SCHEDULES[settings.schedule["name"]].stream
    assert stream is not None
    return stream.build(settings.pipeline.ranks, updates, **settings.schedule_options)


def _check(settings: Settings, updates: Updates) -> None:
    name, ranks = settings.schedule["name"], settings.pipeline.ranks
    if min(updates) == 0:
        raise ValueError(
            f"the last batch of an epoch leaves one of data_parallel.replicas={settings.data_parallel.replicas} "
            f"without samples, and with schedule {name} each replica needs one in every update: choose "
            "data.drop_last=true, a train.global_batch_size that divides the number of samples, or fewer replicas"
        )
    if ranks * sum(updates) > MOST_PAIRS:
        raise ValueError(
            f"schedule {name} would go through {sum(updates):,} micro-batches on pipeline.ranks={ranks} without a "
            f"drain; {MOST_PAIRS // ranks:,} are possible: drain more often with eval.every, at most "
            f"{max(1, MOST_PAIRS // ranks // max(updates)):,}, or lower train.steps or train.epochs"
        )


class Window:
    """The updates from step `first` on, on one rank. `counted` starts the sum of what a share counts over replicas."""

    def __init__(
        self, first: int, count: int, shares: Shares, replica: int, loss: Loss, counted: Callable[[int, Share], Count]
    ) -> None:
        self.first, self._shares, self._counted = first, shares, counted
        pieces = [shares.pieces(step) for step in range(first, first + count)]
        self._sizes = [[rows for piece in update for rows in piece] for update in pieces]
        self.updates: Updates = tuple(map(len, self._sizes))
        self._places = [(k, j) for k, n in enumerate(self.updates) for j in range(n)]  # update and position there
        self._held: dict[int, tuple[Share, Count]] = {}
        self._taken = self._done = self._finished = 0  # updates whose samples were loaded; updates and their forwards
        self.feed = Feed(
            sizes=[rows for sizes in self._sizes for rows in sizes],
            input=lambda m: self._of(m)[0].input_of(*self._rows(m)),
            target=lambda m: self._of(m)[0].target_of(*self._rows(m)),
            draw=lambda m: Draw(first + self._places[m][0], self._places[m][1], replica),
            loss=loss,
            count=lambda m: self._of(m)[1](),
        )

    @property
    def step(self) -> int:
        """The optimizer step that comes next, counted through the run."""
        return self.first + self._done

    def updated(self) -> tuple[int, list[float], float]:
        """An update is done: how many micro-batches were in it, their loss sums, and what they counted here."""
        size = self.updates[self._done]
        losses = [self.feed.losses.pop(m, None) for m in range(self._finished, self._finished + size)]
        held = self._held.pop(self._done, None)
        self._done, self._finished = self._done + 1, self._finished + size
        return size, [float(loss) for loss in losses if loss is not None], held[1].local if held else 0.0

    def load_ahead(self) -> None:
        """Load the samples of one more update, and start their count."""
        if self._taken < len(self.updates):
            step = self.first + self._taken
            share = self._shares.take(step)
            self._held[self._taken] = share, self._counted(step, share)
            self._taken += 1

    def _of(self, microbatch: int) -> tuple[Share, Count]:
        """The samples of a micro-batch's update, and their count."""
        while self._taken <= self._places[microbatch][0]:
            self.load_ahead()
        return self._held[self._places[microbatch][0]]

    def _rows(self, microbatch: int) -> tuple[int, int]:
        """Where a micro-batch's samples begin in its share, and how many there are."""
        update, position = self._places[microbatch]
        return offsets(self._sizes[update])[position], self._sizes[update][position]
