"""Who sent what a span waited for, and how long it was under way: the link between two ranks that every report shares.

    what F of (stage s, micro-batch m) needs         is SEND_F of (s-1, m)
    what B or I of (stage s, micro-batch m) needs    is SEND_B of (s+1, m)

within one replica. A step of several passes repeats its micro-batch numbers: the k-th need is met by the k-th send.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.plan.timeline import Kind, Timeline

Ints = npt.NDArray[np.int64]

# What needs a message -> the kind of its send, and how far the sending stage is.
_NEEDS: dict[int, tuple[int, int]] = {
    Kind.F: (Kind.SEND_F, -1),
    Kind.WAIT_F: (Kind.SEND_F, -1),
    Kind.B: (Kind.SEND_B, 1),
    Kind.I: (Kind.SEND_B, 1),
    Kind.WAIT_B: (Kind.SEND_B, 1),
}
MESSAGE_WAITS = (Kind.WAIT_F, Kind.WAIT_B)

_Key = tuple[int, int, int, int]


def sends_of(timeline: Timeline, ranks: int, needing: Collection[Kind]) -> Ints:
    """For each span of a kind in `needing` the index of the send that it needs; -1 where there is none: shape [n].

    `ranks` is P. Two kinds that need the same message (WAIT_F and F) are not to be asked for at once.
    """
    found = np.full(len(timeline), -1, dtype=np.int64)
    replica = (timeline.rank // max(1, ranks)).tolist()
    kind, stage, microbatch = timeline.kind.tolist(), timeline.stage.tolist(), timeline.microbatch.tolist()
    sends: dict[_Key, list[int]] = {}
    for index in np.flatnonzero(np.isin(timeline.kind, (Kind.SEND_F, Kind.SEND_B))).tolist():
        sends.setdefault((replica[index], kind[index], stage[index], microbatch[index]), []).append(index)
    met: dict[_Key, int] = {}
    for index in np.flatnonzero(np.isin(timeline.kind, list(needing))).tolist():
        send, step = _NEEDS[kind[index]]
        key = (replica[index], send, stage[index] + step, microbatch[index])
        count = met.get(key, 0)
        if count < len(sends.get(key, ())):
            found[index] = sends[key][count]
            met[key] = count + 1
    return found


class Journeys(NamedTuple):
    """Messages on their way, from being issued to being used: parallel arrays, in the time of the timeline.

    `wait`, `send`: indices of spans. `ready`: since when the receiver had nothing else to do (a batch may have been
    loaded within its wait). `delay`: how long the message was under way, as far as that was seen.
    """

    wait: Ints
    send: Ints
    issued: Ints
    ready: Ints
    delay: Ints

    @property
    def late(self) -> npt.NDArray[np.bool_]:
        """Whether the message, and not the receiver, decided when the wait ended."""
        found: npt.NDArray[np.bool_] = self.issued + self.delay >= self.ready
        return found


def journeys(timeline: Timeline, ranks: int) -> Journeys:
    """The journey of every message whose wait and send were both seen. `ranks` is P.

    A message's whole way is seen only where its receiver waited already when it was issued. For another one it is
    taken to be the median of those that were seen from the same stage the same way, as long as that fits between its
    send and its use; where none was seen, only the time that was waited for it counts.
    """
    waits = np.flatnonzero(np.isin(timeline.kind, MESSAGE_WAITS))
    send = sends_of(timeline, ranks, MESSAGE_WAITS)[waits]
    waits, send = waits[send >= 0], send[send >= 0]
    issued, end = timeline.start[send].astype(np.int64), timeline.end[waits].astype(np.int64)
    ready = timeline.start[waits].astype(np.int64)
    loads = np.flatnonzero(timeline.kind == Kind.WAIT_DATA)
    load, within = inside(timeline.rank, timeline.start, timeline.end, loads, waits)
    np.maximum.at(ready, within, timeline.end[load].astype(np.int64))
    undisturbed = np.ones(len(waits), dtype=bool)
    undisturbed[within] = False
    seen = undisturbed & (ready <= issued)
    longest = np.maximum(0, end - issued)
    delay = np.where(seen, longest, np.clip(end - ready, 0, longest))
    _, edge = np.unique(np.stack([timeline.kind[waits], timeline.stage[waits]]), axis=1, return_inverse=True)
    for number in np.unique(edge[seen]):
        here = edge == number
        usual = int(np.median(longest[here & seen]))
        delay[here & ~seen] = np.minimum(longest, usual)[here & ~seen]
    return Journeys(waits, send, issued, ready, delay)


def inside(rank: npt.NDArray[Any], start: Ints, end: Ints, inner: Ints, outer: Ints) -> tuple[Ints, Ints]:
    """Which spans lie within which on the same rank: pairs (index of a span, position in `outer`)."""
    a, b = inner[:, None], outer[None, :]
    found = (rank[a] == rank[b]) & (start[b] <= start[a]) & (end[a] <= end[b])
    pairs = np.nonzero(found)
    return inner[pairs[0]], pairs[1]
