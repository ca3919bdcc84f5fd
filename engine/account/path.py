"""The critical path of a measured step: the chain of things without which it would have ended sooner.

Walked backwards from the end of the last rank to end. At each moment the path is on one rank, and goes on where that
moment was decided:

    computing, updating, loading    on the same rank, when it began
    a message that came late        on the rank that sent it, when it did
    a reduction, a gathering        on the rank that was the last to begin it
    an exchange of norms            on the last rank to get there
    nothing that was recorded       on the same rank, when the last thing that was recorded ended

It covers the step without a gap, from when the last rank had ended the step before, so its links add up to the same
measured time as the waterfall's bars, in integer nanoseconds. (The idea: C.-Q. Yang and B. P. Miller, "Critical path
analysis for the execution of parallel and distributed programs", ICDCS 1988.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from engine.account.messages import MESSAGE_WAITS, inside, journeys
from engine.plan.timeline import COMPUTE_KINDS, Kind, Timeline
from engine.ranks import Rank

CAUSES = ("compute", "transfer", "reduce", "optimizer", "data", "other")
_CAUSE_OF: dict[int, str] = {
    **dict.fromkeys(map(int, COMPUTE_KINDS), "compute"),
    **dict.fromkeys(map(int, MESSAGE_WAITS), "transfer"),
    int(Kind.WAIT_REDUCE): "reduce",
    int(Kind.WAIT_GATHER): "reduce",
    int(Kind.WAIT_COUNT): "reduce",
    int(Kind.WAIT_NORM): "optimizer",
    int(Kind.STEP): "optimizer",
    int(Kind.WAIT_DATA): "data",
}


class Link(NamedTuple):
    """`cause` held the step up on `rank` from `start` to `end`. `span`: index into the timeline, -1 for none."""

    rank: int
    cause: str
    span: int
    start: int
    end: int


class _Piece(NamedTuple):
    """A span, or what of a wait lies on one side of the load within it. `last`: it ends as the span ends."""

    start: int
    end: int
    span: int
    last: bool


def critical_path(timeline: Timeline, ranks: int) -> list[Link]:
    """The links in order of time; each begins where the one before ends. `ranks` is P."""
    if not timeline.ranks:
        return []
    walk = _Walk(timeline, ranks)
    rank = int(timeline.windows[:, 1].argmax())
    moment, links = int(timeline.windows[rank, 1]), []
    while moment > walk.floor:
        goes_on, link = walk.back(rank, moment)
        if link.start < moment:  # a message may take no time
            links.append(link)
        rank, moment = goes_on, link.start
    return links[::-1]


def by_cause(path: Sequence[Link]) -> dict[str, int]:
    """Nanoseconds of the path under each of CAUSES."""
    total = dict.fromkeys(CAUSES, 0)
    for link in path:
        total[link.cause] += link.end - link.start
    return total


def by_rank(path: Sequence[Link]) -> dict[int, int]:
    """Nanoseconds of the path on each world rank that it visits."""
    total: dict[int, int] = defaultdict(int)
    for link in path:
        total[link.rank] += link.end - link.start
    return dict(total)


def name_of(link: Link, timeline: Timeline) -> str:
    """What held the step up: `2F0`; `transfer to 2F0` for its message; the cause where it was no action."""
    if link.span < 0:
        return link.cause
    kind, stage, microbatch = Kind(timeline.kind[link.span]), timeline.stage[link.span], timeline.microbatch[link.span]
    if kind in COMPUTE_KINDS:
        return f"{stage}{kind.name}{microbatch}"
    if kind in MESSAGE_WAITS:
        return f"{link.cause} to {stage}{'F' if kind is Kind.WAIT_F else 'B'}{microbatch}"
    if kind is Kind.WAIT_GATHER:
        return f"gathering stage {stage}"
    return f"{link.cause} of stage {stage}" if kind is Kind.WAIT_REDUCE else link.cause


class _Walk:
    """`floor`: where the path ends. No rank's pieces overlap."""

    def __init__(self, timeline: Timeline, ranks: int) -> None:
        self.floor = int(timeline.windows[:, 0].max())
        self._kind, self._rank, self._start = (c.tolist() for c in (timeline.kind, timeline.rank, timeline.start))
        found = journeys(timeline, ranks)
        late = found.late
        self._sender = dict(zip(found.wait[late].tolist(), found.send[late].tolist(), strict=True))
        self._pieces: dict[int, list[_Piece]] = defaultdict(list)
        for piece in sorted(_pieces(timeline)):
            self._pieces[self._rank[piece.span]].append(piece)
        self._ends = {rank: [piece.end for piece in pieces] for rank, pieces in self._pieces.items()}
        self._last = _last_to_begin(timeline, ranks)
        self._left: set[int] = set()  # waits over which the path has left a rank: each once, so that it gets somewhere

    def back(self, rank: int, moment: int) -> tuple[int, Link]:
        """The link that ends on `rank` at `moment`, and the rank on which the path goes on at its start."""
        pieces, at = self._pieces.get(rank, []), bisect_left(self._ends.get(rank, []), moment)
        if at < len(pieces) and pieces[at].start < moment:
            goes_on, cause, since = self._decided(pieces[at], moment)
            return goes_on, Link(rank, cause, pieces[at].span, max(self.floor, since), moment)
        since = pieces[at - 1].end if at else self.floor
        return rank, Link(rank, "other", -1, max(self.floor, since), moment)

    def _decided(self, piece: _Piece, moment: int) -> tuple[int, str, int]:
        """Where, by what and when it was decided that the piece would not end before `moment`."""
        kind, rank = self._kind[piece.span], self._rank[piece.span]
        cause = _CAUSE_OF[kind]
        if kind in MESSAGE_WAITS:
            decisive = self._sender.get(piece.span, -1) if piece.last else -1
            cause = "transfer" if decisive >= 0 else "other"  # it was there already: unpacking it took this long
        else:
            decisive = self._last.get(piece.span, -1)
        if decisive >= 0 and self._start[decisive] <= moment and piece.span not in self._left:
            self._left.add(piece.span)
            return self._rank[decisive], cause, self._start[decisive]
        return rank, cause, piece.start


def _pieces(timeline: Timeline) -> Iterator[_Piece]:
    """All spans that can be a link, in no order; a wait is cut by the load within it."""
    waits = np.flatnonzero(np.isin(timeline.kind, MESSAGE_WAITS))
    found = np.flatnonzero(timeline.kind == Kind.WAIT_DATA)
    load, within = inside(timeline.rank, timeline.start, timeline.end, found, waits)
    loads = defaultdict(list)
    for inner, outer in zip(load.tolist(), waits[within].tolist(), strict=True):
        loads[outer].append(inner)
    start, end = timeline.start.tolist(), timeline.end.tolist()
    for span, kind in enumerate(timeline.kind.tolist()):
        if kind not in _CAUSE_OF:
            continue
        since = start[span]
        for inner in sorted(loads.get(span, ()), key=lambda at: start[at]):
            if since < start[inner]:
                yield _Piece(since, start[inner], span, last=False)
            since = end[inner]
        if since < end[span]:
            yield _Piece(since, end[span], span, last=True)


def _last_to_begin(timeline: Timeline, ranks: int) -> dict[int, int]:
    """A wait for what several ranks do together -> the span of the rank that was the last to begin it."""
    found: dict[int, int] = {}
    replica = Rank.of(timeline.rank, ranks).replica
    for wait, work, group in (
        (Kind.WAIT_REDUCE, Kind.REDUCE, timeline.stage),
        (Kind.WAIT_GATHER, Kind.GATHER, timeline.stage),
        (Kind.WAIT_NORM, Kind.WAIT_NORM, replica),
    ):
        begun = np.flatnonzero(timeline.kind == work)
        last: dict[int, int] = {}
        for at in begun[np.argsort(timeline.start[begun], kind="stable")].tolist():
            last[int(group[at])] = at
        ends = {(int(timeline.rank[at]), int(group[at])): int(timeline.end[at]) for at in begun.tolist()}
        for at in np.flatnonzero(timeline.kind == wait).tolist():
            key = int(timeline.rank[at]), int(group[at])
            if key in ends and ends[key] > timeline.start[at]:  # else it was over before it was waited for
                found[at] = last[key[1]]
    return found
