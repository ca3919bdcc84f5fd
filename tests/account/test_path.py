"""The critical path: without gaps, on what really decided, and shorter only where the step would have been."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from test_waterfall import GPIPE, costs, steps
from virtual import MS, START, last_step

from engine.account.path import CAUSES, PathLink, by_cause, critical_path, name_of
from engine.plan.actions import Program
from engine.plan.schedules import build
from engine.plan.timeline import COMPUTE_KINDS, Kind, Span, Timeline


@given(steps())
def test_links_join_and_cover_the_step(step: tuple[Program, int, Timeline]) -> None:
    program, _, timeline = step
    path = critical_path(timeline, program.ranks)
    begin, end = int(timeline.windows[:, 0].max()), int(timeline.windows[:, 1].max())
    assert (path[0].start, path[-1].end) == (begin, end)
    assert sum(by_cause(path).values()) == end - begin
    for link in path:
        assert link.cause in CAUSES and link.start < link.end
        if link.cause == "compute":
            assert timeline.kind[link.span] in COMPUTE_KINDS and timeline.rank[link.span] == link.rank
            assert timeline.start[link.span] <= link.start and link.end <= timeline.end[link.span]
    for before, after in pairwise(path):
        assert before.end == after.start
        if before.rank != after.rank:  # it changes ranks only where ranks meet
            assert after.cause in ("transfer", "reduce", "optimizer")


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "chimera"])
def test_of_a_step_that_only_computes_and_sends_the_path_is_that(name: str) -> None:
    program = build(name, 4, 8)
    timeline = last_step(program, load=0, update=0)
    found = by_cause(critical_path(timeline, 4))
    assert found["other"] == found["data"] == found["reduce"] == found["optimizer"] == 0
    assert found["compute"] + found["transfer"] == int(np.diff(timeline.windows).max())


def named(path: list[PathLink], timeline: Timeline) -> list[str]:
    return [f"{timeline.stage[k.span]}{Kind(timeline.kind[k.span]).name}{timeline.microbatch[k.span]}" for k in path]


def test_the_path_of_gpipe_by_hand() -> None:
    """Two stages, two micro-batches: in through F0, along the slower stage, out through B1."""
    program = build("gpipe", 2, 2)
    timeline = last_step(program, action=costs(stage=1, times=3), load=0, update=0, link=lambda *_: 0)
    assert named(critical_path(timeline, 2), timeline) == ["0F0", "1F0", "1F1", "1B0", "1B1", "0B1"]


def test_the_path_passes_through_what_is_slow() -> None:
    late = last_step(GPIPE, action=costs(microbatch=3, more=20 * MS))
    assert "2F3" in named(critical_path(late, 4), late)
    link = last_step(GPIPE, link=lambda a, b: 30 * MS if (a, b) == (1, 2) else 0)
    assert by_cause(critical_path(link, 4))["transfer"] == 30 * MS
    loader = last_step(GPIPE, load=90 * MS)
    assert by_cause(critical_path(loader, 4))["data"] >= 90 * MS
    reduction = last_step(GPIPE, 2, reduce=lambda stage: 30 * MS if stage == 0 else 0)
    assert by_cause(critical_path(reduction, 4))["reduce"] == 30 * MS
    gathering = last_step(GPIPE, 2, gather=lambda stage: 30 * MS if stage == 0 else 0, reduce=lambda stage: 0)
    path = critical_path(gathering, 4)
    assert by_cause(path)["reduce"] == 30 * MS
    assert "gathering stage 0" in [name_of(link, gathering) for link in path]


def test_a_slow_replica_is_where_the_path_is() -> None:
    slow = last_step(GPIPE, 2, action=costs(replica=1, slower=1.5))
    path = critical_path(slow, 4)
    assert sum(link.end - link.start for link in path if link.rank >= 4) > 0.9 * (path[-1].end - path[0].start)


def test_a_message_that_was_there_already_is_not_to_blame() -> None:
    """Rank 1 receives late because it was busy, and takes a moment to unpack: the path stays on it."""
    spans = [
        Span(0, Kind.F, 0, 0, START, START + 1 * MS),
        Span(0, Kind.SEND_F, 0, 0, START + 1 * MS, START + 1 * MS),
        Span(1, Kind.STEP, -1, -1, START, START + 8 * MS),
        Span(1, Kind.WAIT_F, 1, 0, START + 8 * MS, START + 9 * MS),
        Span(1, Kind.F, 1, 0, START + 9 * MS, START + 12 * MS),
    ]
    timeline = Timeline.of(spans, [[START, START + 2 * MS], [START, START + 12 * MS]], measured=True)
    assert [(link.rank, link.cause) for link in critical_path(timeline, 2)] == [
        (1, "optimizer"), (1, "other"), (1, "compute"),
    ]  # fmt: skip


def test_a_step_without_spans_has_a_path_all_the_same() -> None:
    assert critical_path(Timeline.of([], [[5, 9], [3, 8]], measured=True), 2) == [PathLink(0, "other", -1, 5, 9)]
