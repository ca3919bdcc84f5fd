"""Who sent what a span waited for: the link between two ranks that the account and the trace's arrows share.

    what F of (stage s, micro-batch m) needs         is SEND_F of (s-1, m)
    what B or I of (stage s, micro-batch m) needs    is SEND_B of (s+1, m)

within one replica. A step of several passes repeats its micro-batch numbers: the k-th need is met by the k-th send.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from engine.plan.timeline import Kind, Timeline

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


def sends_of(timeline: Timeline, ranks: int, needing: Collection[Kind]) -> npt.NDArray[np.int64]:
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
