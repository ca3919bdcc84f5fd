"""The account: where every nanosecond of a rank's step went, under exactly one of the categories.

Each moment of a rank's window belongs to the category of lowest precedence (`engine/categories.py`) that claims it:

    by kind of span     compute, optimizer, data, reduce, and the exchange of norms, which is drain
    by wait             a message awaited is fill before the rank's first compute; later it is stall until the sender
                        issued the message, and transfer after that
    by place            everything after the rank's last compute is drain, and everything at all is other

so the categories add up to the window exactly, in integer nanoseconds, whatever the spans look like. A batch that is
loaded while the rank waits for a message anyway is awaited only from the moment the message was issued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.account.messages import MESSAGE_WAITS, inside, sends_of
from engine.categories import CATEGORIES, NAMES, claims
from engine.plan.timeline import Kind, Timeline

Ints = npt.NDArray[np.int64]

_ORDER = tuple(category.name for category in sorted(CATEGORIES, key=lambda category: category.precedence))
_COLUMN = np.array([NAMES.index(name) for name in _ORDER])
_COMPUTE, _DATA, _FILL, _DRAIN, _STALL, _TRANSFER, _OTHER = map(
    _ORDER.index, ("compute", "data", "fill", "drain", "stall", "transfer", "other")
)
_NONE = -1  # spans that have no class by their kind: messages, and what goes on in the background
_CLASS = np.full(max(Kind) + 1, _NONE)
for _kind, _category in claims().items():
    _CLASS[_kind] = _ORDER.index(_category.name)


@dataclass(frozen=True, eq=False)
class Account:
    """Nanoseconds of a step by rank and category, and what its messages took.

    `table`: int64 [ranks, categories], columns as in NAMES; each row adds up to the rank's window.

    `latency`: int64 nanoseconds [stages], summed over `messages` [stages] between stages s and s+1, both ways: those
    whose receiver waited already when they were issued, so that their whole way was seen.
    """

    table: Ints
    latency: Ints
    messages: Ints


class _Pieces(NamedTuple):
    """Stretches of time on a rank, each with the class that it claims: parallel arrays."""

    rank: Ints
    kind: Ints  # an index into _ORDER
    start: Ints
    end: Ints


class Stretches(NamedTuple):
    """Windows cut at every change of category, rank by rank in order of time: parallel arrays; `name` indexes NAMES."""

    rank: Ints
    name: Ints
    start: Ints
    end: Ints


class _Claims(NamedTuple):
    """What covers the windows. `waits` are indices of spans that saw a message's whole way if it was late at all;
    `issued` says when that message was sent.
    """

    pieces: list[_Pieces]
    waits: Ints
    issued: Ints


def account(timeline: Timeline, ranks: int, stages: int, running: bool = False) -> Account:
    """The account of one measured step. `ranks` is P; the timeline holds the ranks of all replicas.

    `running`: the pipeline went on when the windows began, as between the updates of an asynchronous schedule, so that
    nothing is filling.
    """
    claims = _claims(timeline, ranks, running)
    cut = _sweep(claims.pieces, timeline)
    table = np.zeros((timeline.ranks, len(NAMES)), dtype=np.int64)
    np.add.at(table, (cut.rank, cut.name), cut.end - cut.start)
    return Account(table, *_latencies(timeline, claims.waits, claims.issued, stages))


def stretches(timeline: Timeline, ranks: int, running: bool = False) -> Stretches:
    """The stretches of a step that `account` adds up, on the time axis."""
    cut = _sweep(_claims(timeline, ranks, running).pieces, timeline)
    begins = np.ones(len(cut.rank), dtype=bool)
    begins[1:] = (cut.rank[1:] != cut.rank[:-1]) | (cut.name[1:] != cut.name[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(begins))[: len(first)] - 1
    return Stretches(cut.rank[first], cut.name[first], cut.start[first], cut.end[last])


def _claims(timeline: Timeline, ranks: int, running: bool) -> _Claims:
    windows = timeline.windows.astype(np.int64)
    begin, finish = _bounds(timeline)
    rank = timeline.rank.astype(np.int64)
    start = np.clip(timeline.start, begin[rank], finish[rank])
    end = np.maximum(start, np.clip(timeline.end, begin[rank], finish[rank]))
    named = _CLASS[timeline.kind]
    computing = named == _COMPUTE
    first, last = _compute_range(rank[computing], timeline.start[computing], timeline.end[computing], windows)
    first, last = begin if running else first, np.clip(last, begin, finish)

    waits = np.flatnonzero(np.isin(timeline.kind, MESSAGE_WAITS))
    send = sends_of(timeline, ranks, MESSAGE_WAITS)[waits]
    issued = np.where(send >= 0, timeline.start[send], end[waits])  # no send was seen: not issued while it waited
    load, wait = inside(rank, start, end, np.flatnonzero(named == _DATA), waits)
    np.maximum.at(start, load, np.clip(issued[wait], start[load], end[load]))
    classed = named != _NONE
    by_kind = _Pieces(rank[classed], named[classed], start[classed], end[classed])
    by_message = _split(rank[waits], start[waits], end[waits], issued, first)
    everyone = np.arange(timeline.ranks)
    drains = _Pieces(everyone, np.full(timeline.ranks, _DRAIN), last, finish)
    undisturbed = np.delete(np.arange(len(waits)), wait)
    return _Claims([by_kind, *by_message, drains], waits[undisturbed], issued[undisturbed])


def _bounds(timeline: Timeline) -> tuple[Ints, Ints]:
    """When each rank's window begins and ends."""
    windows = timeline.windows.astype(np.int64)
    return windows[:, 0], np.maximum(windows[:, 0], windows[:, 1])


def _compute_range(rank: Ints, start: Ints, end: Ints, windows: Ints) -> tuple[Ints, Ints]:
    """When each rank's first compute begins and its last one ends. Without any, all of its window comes after."""
    some = end > start
    first, last = np.full(len(windows), np.iinfo(np.int64).max), np.full(len(windows), np.iinfo(np.int64).min)
    np.minimum.at(first, rank[some], start[some])
    np.maximum.at(last, rank[some], end[some])
    idle = first > last
    return np.where(idle, windows[:, 0], first), np.where(idle, windows[:, 0], last)


def _split(rank: Ints, start: Ints, end: Ints, issued: Ints, first: Ints) -> list[_Pieces]:
    """Waits for messages in three: before the rank's first compute; until the message was issued; after that."""
    filled = np.clip(first[rank], start, end)
    sent = np.clip(issued, filled, end)
    bounds = (start, filled, sent, end)
    kinds = (_FILL, _STALL, _TRANSFER)
    return [_Pieces(rank, np.full(len(rank), k), a, b) for k, a, b in zip(kinds, bounds, bounds[1:], strict=False)]


def _sweep(pieces: list[_Pieces], timeline: Timeline) -> Stretches:
    """Cut all windows, laid end to end, at every start and end; give each bit to the first class that covers it."""
    rank, kind, start, end = (np.concatenate(column) for column in zip(*pieces, strict=True))
    begin, finish = _bounds(timeline)
    offsets = np.concatenate([[0], np.cumsum(finish - begin)])
    shift = (offsets[:-1] - begin)[rank]
    cuts, at = np.unique(np.concatenate([start + shift, end + shift, offsets]), return_inverse=True)
    cover = np.zeros((len(_ORDER), len(cuts)), dtype=np.int64)
    np.add.at(cover, (kind, at[: len(rank)]), 1)
    np.add.at(cover, (kind, at[len(rank) : 2 * len(rank)]), -1)
    covered = np.cumsum(cover, axis=1)[:, :-1] > 0
    covered[_OTHER] = True
    owner = np.searchsorted(offsets, cuts[:-1], side="right") - 1
    moved = (begin - offsets[:-1])[owner]
    return Stretches(owner, _COLUMN[covered.argmax(axis=0)], cuts[:-1] + moved, cuts[1:] + moved)


def _latencies(timeline: Timeline, waits: Ints, issued: Ints, stages: int) -> tuple[Ints, Ints]:
    """By the edge that a message crossed: how long messages took, and how many there were."""
    edge = np.where(timeline.kind[waits] == Kind.WAIT_F, timeline.stage[waits] - 1, timeline.stage[waits])
    seen = (timeline.start[waits] <= issued) & (issued < timeline.end[waits]) & (edge >= 0) & (edge < stages)
    latency, messages = np.zeros(stages, dtype=np.int64), np.zeros(stages, dtype=np.int64)
    np.add.at(latency, edge[seen], (timeline.end[waits] - issued)[seen])
    np.add.at(messages, edge[seen], 1)
    return latency, messages
