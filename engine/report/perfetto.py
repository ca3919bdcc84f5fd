"""A timeline as a Chrome trace, for Perfetto: one process per world rank, one lane per kind, arrows send -> use.

All ranks are in one file on one clock. An overlapped pair is one slice with its two computations inside. Times are
microseconds with the nanoseconds behind the point, from the earliest moment of the step. Of each bucket of gradients
there is a mark when its last one is there, and a slice while it is reduced. An arrow begins at the start
of the send and ends at the start of the computation that used the message: both are slices that exist, and the second
never comes before the first.
The critical path of the step is a process of its own behind the ranks, whose slices say what held the step up and
where, and why.
(Format: "Trace Event Format", the Chromium project.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.account.messages import sends_of
from engine.account.path import critical_path, name_of
from engine.files import write_text
from engine.plan.timeline import COMPUTE_KINDS, Kind, Span, Timeline
from engine.ranks import Rank

Event = dict[str, Any]

_LANES = ("compute", "wait", "send/receive", "reduce", "step")
_COMPUTE, _WAIT, _MESSAGE, _REDUCE, _STEP = range(len(_LANES))
_OTHER_LANES = {
    Kind.REDUCE: _REDUCE,
    Kind.GATHER: _REDUCE,
    Kind.STEP: _STEP,
    **dict.fromkeys((Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B), _MESSAGE),
}
_PATH = "critical path"
_USERS = (Kind.F, Kind.B, Kind.I)


def write_trace(path: Path, timeline: Timeline, ranks: int, uncertainty: Sequence[int] = ()) -> None:
    """Write a measured timeline; `ranks` is P, timeline ranks count over replicas. `uncertainty`: of each rank's clock,
    ns; it stands beside the rank's name."""
    write_text(path, trace_of(timeline, ranks, uncertainty))


def trace_of(timeline: Timeline, ranks: int, uncertainty: Sequence[int] = ()) -> str:
    """The content of the file, an event a line."""
    listed = [*trace_events(timeline, ranks), *_doubts(uncertainty)]
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in listed)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n'


def trace_events(timeline: Timeline, ranks: int) -> list[Event]:
    """Names first, then slices and arrow ends by time.

    Of one moment a slice comes before what is inside it, and an arrow, which binds to it, last.
    """
    base = int(timeline.start.min()) if len(timeline) else 0
    spans = list(timeline)
    timed = [*_pairs(timeline, spans, base), *_slices(spans, base), *_arrows(timeline, spans, ranks, base)]
    timed += _path(timeline, ranks, base)
    return [
        *_names(timeline.ranks, ranks),
        *_name_path(timeline.ranks),
        *sorted(timed, key=lambda event: (event["ts"], event["ph"] != "X")),
    ]


def _name_path(world: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": world, "tid": 0, "name": "process_name", "args": {"name": _PATH}}
    yield {"ph": "M", "pid": world, "tid": 0, "name": "process_sort_index", "args": {"sort_index": world}}


def _path(timeline: Timeline, ranks: int, base: int) -> Iterator[Event]:
    for link in critical_path(timeline, ranks):
        yield {
            "ph": "X",
            "pid": timeline.ranks,
            "tid": 0,
            "ts": _microseconds(link.start, base),
            "dur": _microseconds(link.end, link.start),
            "name": name_of(link, timeline),
            "cat": _PATH,
            "args": {"rank": link.rank, "cause": link.cause},
        }


def _doubts(uncertainty: Sequence[int]) -> Iterator[Event]:
    for pid, ns in enumerate(uncertainty):
        if ns:
            said = f"clock +- {ns * 1e-6:.3f} ms"
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_labels", "args": {"labels": said}}


def _names(world: int, ranks: int) -> Iterator[Event]:
    for pid in range(world):
        _, replica, rank = Rank.of(pid, ranks)
        name = f"rank {rank} (replica {replica})" if world > ranks else f"rank {rank}"
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
        for tid, lane in enumerate(_LANES):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _slices(spans: list[Span], base: int) -> Iterator[Event]:
    for span in spans:
        yield _moment(span, base) if span.kind == Kind.QUEUED else _slice(span, _name(span), base)


def _pairs(timeline: Timeline, spans: list[Span], base: int) -> Iterator[Event]:
    for first, second in timeline.pairs.tolist():
        a, b = spans[first], spans[second]
        whole = a._replace(start=min(a.start, b.start), end=max(a.end, b.end))
        yield _slice(whole, f"({_name(a)};{_name(b)})OVERLAP_F_B", base)


def _slice(span: Span, name: str, base: int) -> Event:
    lane = _lane(Kind(span.kind))
    return {
        "ph": "X",
        "pid": span.rank,
        "tid": lane,
        "ts": _microseconds(span.start, base),
        "dur": _microseconds(max(span.start, span.end), int(span.start)),
        "name": name,
        "cat": _LANES[lane],
        "args": {"stage": span.stage, "microbatch": span.microbatch},
    }


def _moment(span: Span, base: int) -> Event:
    """A bucket's last gradient is there: a mark, because buckets that wait for their turn overlap."""
    return {
        "ph": "i",
        "s": "t",
        "pid": span.rank,
        "tid": _REDUCE,
        "ts": _microseconds(span.start, base),
        "name": f"{span.stage}READY",
        "cat": _LANES[_REDUCE],
        "args": {"stage": span.stage},
    }


def _arrows(timeline: Timeline, spans: list[Span], ranks: int, base: int) -> Iterator[Event]:
    sends = sends_of(timeline, ranks, _USERS)
    for number, user in enumerate(np.flatnonzero(sends >= 0).tolist()):
        send, use = spans[sends[user]], spans[user]
        common = {"id": number, "name": "message", "cat": "message"}
        start, end = _microseconds(send.start, base), _microseconds(use.start, base)
        yield {"ph": "s", "pid": send.rank, "tid": _MESSAGE, "ts": start, **common}
        yield {"ph": "f", "bp": "e", "pid": use.rank, "tid": _COMPUTE, "ts": end, **common}


def _lane(kind: Kind) -> int:
    return _COMPUTE if kind in COMPUTE_KINDS else _OTHER_LANES.get(kind, _WAIT)


def _name(span: Span) -> str:
    """`2F0`, `1WAIT_B3`; without what the span does not have."""
    stage = span.stage if span.stage >= 0 else ""
    return f"{stage}{Kind(span.kind).name}{span.microbatch if span.microbatch >= 0 else ''}"


def _microseconds(moment_ns: float, base: int) -> float:
    return (int(moment_ns) - base) / 1000
