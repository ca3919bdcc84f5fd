"""One traced step as one compact JSON document: all that a viewer needs, with no file beside it.

    {"version": 1, "step": 12, "schedule": "1f1b", "ranks": P, "replicas": R, "stages": S, "microbatches": M,
     "time": ns, "origin": ns, "windows": [[start, end], ...], "uncertainty": [ns, ...],
     "spans":     {"rank": [], "kind": [], "stage": [], "microbatch": [], "start": [], "length": [], "sender": []},
     "pairs":     [[first, second], ...],
     "predicted": {"rank": [], "kind": [], "stage": [], "microbatch": [], "start": [], "length": []} or null,
     "stretches": {"rank": [], "name": [], "start": [], "length": []},
     "account":   [[ns, ...], ...],
     "waterfall": {"bars": {"work": ns, ..., "rest": ns}, "waiting": ns, "alone": [ns, ...]} or null,
     "no_waterfall": "why there is none" or null,
     "path":      {"rank": [], "cause": [], "span": [], "start": [], "length": []},
     "names":     {"kind": {"0": "F", ...}, "account": [...], "cause": [...]},
     "categories": [{"name", "what", "remedy", "colour", "bubble", "kinds"}, ...],
     "bars":       [{"name", "what", "colour"}, ...]}

All times are integer nanoseconds. `origin` is the moment on the clock of rank 0's host from which `windows`, `start` of
spans, stretches and path count; `predicted` counts from 0, has the ranks of one replica, and is null where the step was
not a whole one. World rank w, an index into `windows`, `uncertainty` and `account`, is replica * P + pipeline rank.

    time         from when the last rank had ended the step before to when the last one has ended this one: the bars of
                 `waterfall` add up to it, and so do the lengths of `path`, exactly
    uncertainty  of each rank's clock against that of rank 0: 0 where they share it
    kind         a number of plan/timeline.Kind; stage and micro-batch are -1 where there is none
    sender       of a wait for a message (WAIT_F, WAIT_B): the index of the SEND span that it waited for; else -1
    pairs        indices of the two computations of each overlapped pair, which are one action
    stretches    each rank's window cut at every change of name; `name` indexes names.account
    account      the stretches' sums: a row per rank, columns as in names.account
    path         the critical path in order of time; `cause` indexes names.cause, `span` is an index into `spans` or -1
    categories   how the names of the account are drawn and explained, in the order in which they are shown; bars: the
                 same of the waterfall. Earlier documents have neither
    waterfall    null where the step was not a whole one; `waiting`: the part of the bar `reduce` that is waiting for
                 slower replicas; `alone`: what the pipeline of each replica would have taken by itself
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.account.bubble import Stretches, account, stretches
from engine.account.messages import MESSAGE_WAITS, sends_of
from engine.account.path import CAUSES, PathLink, critical_path
from engine.account.replay.waterfall import BARS, Waterfall, missing
from engine.categories import NAMES, as_data
from engine.job import Job
from engine.plan.timeline import Kind, Timeline

VERSION = 1


def document(
    job: Job,
    step: int,
    timeline: Timeline,
    waterfall: Waterfall | None,
    predicted: Timeline | None,
    uncertainty: Sequence[int],
) -> str:
    """The document of one measured step. `predicted`: simulated in seconds; `uncertainty`: ns, by world rank."""
    origin = int(timeline.windows.min())
    running = bool(job.windows) and step not in np.cumsum([0, *job.windows])  # between two updates without a drain
    cut, found = stretches(timeline, job.ranks, running), account(timeline, job.ranks, job.placement.stages, running)
    content = {
        "version": VERSION,
        "step": step,
        "schedule": job.compute.name,
        "ranks": job.ranks,
        "replicas": timeline.ranks // job.ranks,
        "stages": job.placement.stages,
        "microbatches": job.compute.microbatches,
        "time": int(timeline.windows[:, 1].max() - timeline.windows[:, 0].max()),
        "origin": origin,
        "windows": (timeline.windows - origin).tolist(),
        "uncertainty": list(uncertainty[: timeline.ranks]),
        "spans": _spans(timeline, origin) | {"sender": sends_of(timeline, job.ranks, MESSAGE_WAITS).tolist()},
        "pairs": timeline.pairs.tolist(),
        "predicted": None if predicted is None else _spans(_in_nanoseconds(predicted), 0),
        "stretches": _stretches(cut, origin),
        "account": found.table.tolist(),
        "waterfall": None if waterfall is None else _waterfall(waterfall),
        "no_waterfall": missing(job) if waterfall is None else None,
        "path": _path(critical_path(timeline, job.ranks), origin),
        "names": {"kind": {str(int(k)): k.name for k in Kind}, "account": list(NAMES), "cause": list(CAUSES)},
    } | as_data()
    return json.dumps(content, separators=(",", ":"))


def _spans(timeline: Timeline, origin: int) -> dict[str, list[int]]:
    return {
        "rank": timeline.rank.tolist(),
        "kind": timeline.kind.tolist(),
        "stage": timeline.stage.tolist(),
        "microbatch": timeline.microbatch.tolist(),
        "start": (timeline.start - origin).tolist(),
        "length": (timeline.end - timeline.start).tolist(),
    }


def _in_nanoseconds(seconds: Timeline) -> Timeline:
    start, end, windows = (np.rint(t * 1e9).astype(np.int64) for t in (seconds.start, seconds.end, seconds.windows))
    return Timeline(seconds.rank, seconds.kind, seconds.stage, seconds.microbatch, start, end, windows)


def _waterfall(waterfall: Waterfall) -> dict[str, Any]:
    bars = dict(zip(BARS, waterfall.bars, strict=True))
    return {"bars": bars, "waiting": waterfall.waiting, "alone": list(waterfall.alone)}


def _stretches(cut: Stretches, origin: int) -> dict[str, Any]:
    return {
        "rank": cut.rank.tolist(),
        "name": cut.name.tolist(),
        "start": (cut.start - origin).tolist(),
        "length": (cut.end - cut.start).tolist(),
    }


def _path(path: Sequence[PathLink], origin: int) -> dict[str, list[int]]:
    return {
        "rank": [link.rank for link in path],
        "cause": [CAUSES.index(link.cause) for link in path],
        "span": [link.span for link in path],
        "start": [link.start - origin for link in path],
        "length": [link.end - link.start for link in path],
    }
