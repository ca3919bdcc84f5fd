"""Spans of ranks on different hosts brought to one clock: that of rank 0.

    reading, at the start and the end of a run ──► offset at any moment, the drift between them included
    messages of the step ──────────────────────► no receive ends before its send began

A reading is wrong by its uncertainty at most (`telemetry/clock.py`), which may be longer than a message takes. So each
step's messages have the last word: where the offsets would let one arrive before it was sent, the clocks of whole
groups of ranks are moved by the least that mends it. Each message bounds a difference between two clocks from one side;
as clocks that keep all bounds exist (the true ones), the longest-path closure of the bounds finds some.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from engine.account.messages import MESSAGE_WAITS, sends_of
from engine.plan.timeline import Timeline
from engine.telemetry.records import Record

_Ints = npt.NDArray[np.int64]
_NONE = -(2**60)  # no bound: smaller than any difference between two clocks


class ClockAlignment:
    """Brings spans to the clock of rank 0, by the readings of a run of `world` ranks.

    Without any, all ranks have one clock, and nothing is changed.
    """

    def __init__(self, world: int, ranks: int) -> None:
        self._ranks = ranks
        self._leader = np.zeros(world, dtype=np.int64)  # the first rank with the same clock
        self._readings: dict[int, list[tuple[int, int, int]]] = {}  # rank -> (at, offset, uncertainty), in order

    def add(self, record: Record) -> None:
        """Take in a `clock` record: one reading of a rank."""
        meta = record.meta
        self._leader[meta["rank"]] = meta["leader"]
        self._readings.setdefault(meta["rank"], []).append((meta["at_ns"], meta["offset_ns"], meta["uncertainty_ns"]))

    @property
    def several(self) -> bool:
        """Whether some rank has another clock than rank 0."""
        return bool(self._readings)

    def leader(self, rank: int) -> int:
        """The first rank that has the same clock as `rank`."""
        return int(self._leader[rank])

    @property
    def uncertainty(self) -> list[int]:
        """Nanoseconds by which each rank's clock may be off, the worst of its readings; 0 with rank 0's own."""
        return [max((u for *_, u in self._readings.get(rank, ())), default=0) for rank in range(len(self._leader))]

    @property
    def drift(self) -> dict[int, float]:
        """Leader of a foreign clock -> how much faster rank 0's runs, as a fraction; of those that were read twice."""
        found = {}
        for rank in np.unique(self._leader[self._leader > 0]).tolist():
            (first, before, _), (last, after, _) = self._readings[rank][0], self._readings[rank][-1]
            if last > first:
                found[rank] = (after - before) / (last - first)
        return found

    def aligned(self, timeline: Timeline) -> Timeline:
        """The same step on the clock of rank 0, every receive at or after its send."""
        if not self.several:
            return timeline
        shift = np.array([self._offset(rank, int(timeline.windows[rank, 1])) for rank in range(timeline.ranks)])
        moved = _moved(timeline, shift)
        return _moved(moved, self._corrections(moved))

    def _offset(self, rank: int, moment: int) -> int:
        """Of one rank at a moment of its own clock: on the line through its first and its last reading."""
        readings = self._readings.get(rank)
        if not readings:
            return 0
        (first, before, _), (last, after, _) = readings[0], readings[-1]
        if last == first:
            return before
        return before + round((after - before) * ((moment - first) / (last - first)))

    def _corrections(self, timeline: Timeline) -> _Ints:
        """What to add to each rank's moments so that no message is used before it was sent: [W]."""
        leaders, group = np.unique(self._leader, return_inverse=True)
        bounds = np.full((len(leaders), len(leaders)), _NONE)
        waits = np.flatnonzero(np.isin(timeline.kind, MESSAGE_WAITS))
        sends = sends_of(timeline, self._ranks, MESSAGE_WAITS)[waits]
        waits, sends = waits[sends >= 0], sends[sends >= 0]
        ways = group[timeline.rank[sends]], group[timeline.rank[waits]]
        np.maximum.at(bounds, ways, timeline.start[sends] - timeline.end[waits])
        correction: _Ints = settled(bounds)[group]
        return correction


def settled(bounds: _Ints) -> _Ints:
    """The corrections c of clocks, nearest to 0, with c[b] - c[a] >= bounds[a, b] and c[0] = 0.

    `bounds`: [D, D] integers. They are settled one clock after another; where no corrections keep all bounds, the
    middle between what is asked for is taken.
    """
    longest = bounds.copy()
    np.fill_diagonal(longest, 0)
    for through in range(len(longest)):
        way = longest[:, through, None] + longest[None, through, :]
        longest = np.maximum(longest, np.maximum(way, _NONE))
    found = np.zeros(len(longest), dtype=np.int64)
    for clock in range(1, len(longest)):
        low = int((found[:clock] + longest[:clock, clock]).max())
        high = int((found[:clock] - longest[clock, :clock]).min())
        found[clock] = min(max(0, low), high) if low <= high else (low + high) // 2
    return found


def _moved(timeline: Timeline, shift: _Ints) -> Timeline:
    here = shift[timeline.rank]
    return replace(
        timeline, start=timeline.start + here, end=timeline.end + here, windows=timeline.windows + shift[:, None]
    )
