"""How much of a reduction is hidden, of what could be: worked by hand, by property, and in real runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import recorded
from harness import run_threads, settings
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import scheduled
from recorded import MS
from virtual import last_step

from engine.account.measure import Measure
from engine.account.overlap import Overlap, overlap
from engine.plan.actions import Program
from engine.plan.timeline import Kind, Span, Timeline
from engine.report.text import overlap_text
from engine.settings import AllReduceSettings

EVERY_GRADIENT = AllReduceSettings(bucket_bytes=1)
MLP = {"_target_": "toys.mlp", "loss": {"_target_": "toys.TokenLoss"}}


def bucket(rank: int, ready: int, start: int, end: int, stage: int = 0) -> list[Span]:
    return [Span(rank, Kind.QUEUED, stage, -1, ready, start), Span(rank, Kind.REDUCE, stage, -1, start, end)]


def of(spans: list[Span], ranks: int = 2) -> Overlap:
    return overlap(Timeline.of(spans, [[0, 100]] * ranks, measured=True))


def test_worked_by_hand() -> None:
    """Two members compute until 40. Of the first bucket (from 20 on: then both have begun it) all is hidden; the second
    could have followed it at once, at 30, and been hidden for 10 of its 15, but began at 36; the third could not."""
    spans = [Span(0, Kind.B, 0, 0, 0, 30), Span(1, Kind.B, 0, 0, 0, 40)]
    for rank, first in ((0, 10), (1, 20)):
        spans += bucket(rank, first, first, 30) + bucket(rank, 25, 36, 51) + bucket(rank, 40, 60, 70)
    found = of(spans)
    assert found.total.tolist() == [35, 35]
    assert found.hideable.tolist() == [20, 20]
    assert found.hidden.tolist() == [14, 14]
    assert found.share == pytest.approx(0.7) and found.shares == [pytest.approx(0.7)] * 2


def test_what_nothing_could_hide_has_no_share() -> None:
    spans = [Span(0, Kind.B, 0, 0, 0, 10), Span(1, Kind.B, 0, 0, 0, 10)]
    found = of([*spans, *bucket(0, 10, 10, 20), *bucket(1, 10, 10, 20)])
    assert found.total.tolist() == [10, 10] and found.share is None and found.shares == [None, None]
    assert of(spans).total.tolist() == [0, 0] and of([]).share is None


def test_waiting_for_a_slow_replica_is_no_reduction() -> None:
    spans = [Span(0, Kind.B, 0, 0, 0, 10), Span(1, Kind.B, 0, 0, 0, 90)]
    found = of([*spans, *bucket(0, 5, 5, 95), *bucket(1, 85, 85, 95)])
    assert found.total.tolist() == [10, 10]
    assert found.hidden.tolist() == [5, 5] == found.hideable.tolist()


def test_the_cool_down_of_a_pipeline_hides() -> None:
    """Stage 1 is done at 10 and reduced until 30, while stage 0 of both replicas computes: its rank waits, and yet
    nothing of it costs anything."""
    spans = [Span(rank, Kind.B, rank % 2, 0, 10 * (1 - rank % 2), 10 + 30 * (1 - rank % 2)) for rank in range(4)]
    found = of([*spans, *bucket(1, 10, 10, 30, 1), *bucket(3, 10, 10, 30, 1)], 4)
    assert found.hidden.tolist() == found.total.tolist() == [0, 20, 0, 20]


moments = st.integers(0, 60)


@st.composite
def rounds(draw: st.DrawFn) -> list[Span]:
    """Ranks that reduce shared buckets one by one, each not before it is ready, and not done before all have begun."""
    ranks = draw(st.integers(1, 3))
    spans = [Span(rank, Kind.B, 0, 0, 0, draw(st.integers(1, 90))) for rank in range(ranks)]
    free = [0] * ranks
    for _ in range(draw(st.integers(0, 5))):
        ready = [draw(moments) for _ in range(ranks)]
        start = [max(a, b) + draw(st.integers(0, 9)) for a, b in zip(free, ready, strict=True)]
        free = [max(start) + draw(st.integers(0, 30)) for _ in range(ranks)]
        for rank in range(ranks):
            spans += bucket(rank, ready[rank], start[rank], free[rank])
    return spans


@given(rounds())
def test_hidden_is_never_more_than_could_be_and_the_order_of_ranks_means_nothing(spans: list[Span]) -> None:
    ranks = 1 + max(span.rank for span in spans)
    found = of(spans, ranks)
    assert (
        (found.hidden >= 0).all() and (found.hidden <= found.hideable).all() and (found.hideable <= found.total).all()
    )
    again = of(sorted(spans, key=lambda span: -span.rank), ranks)
    assert again.hideable.tolist() == found.hideable.tolist() and again.hidden.tolist() == found.hidden.tolist()


@given(scheduled(("gpipe", "1f1b", "zb_h1", "interleaved_1f1b"), most=4), st.integers(1, 30))
def test_reductions_that_start_when_they_can_are_hidden_as_far_as_they_can_be(program: Program, lasts: int) -> None:
    """In virtual time a stage starts to be reduced once it is complete and the one before it on its rank is done."""
    timeline = last_step(program, 2, reduce=lambda stage: lasts * MS)
    found = overlap(timeline)
    assert (found.hidden <= found.hideable).all() and found.hidden.sum() == found.hideable.sum()
    assert found.total.sum() == 2 * program.stages * lasts * MS


def test_a_measure_leaves_out_the_first_step_and_sums_the_others() -> None:
    job = recorded.job("gpipe", 2, 4, replicas=2)
    measure = Measure(job)
    for lasts in (50, 3, 5):
        measure.add(last_step(job.compute, 2, reduce=lambda stage, lasts=lasts: lasts * MS))
    bubbles = measure.result()
    assert bubbles is not None and bubbles.overlap is not None and bubbles.overlap.steps == 2
    assert bubbles.overlap.total.tolist() == [8 * MS] * 4
    assert overlap_text(bubbles.overlap).startswith("Reducing took a rank 4.0 ms a step;")
    parallel = replace(job.settings.data_parallel, mode="async")
    apart = replace(job, settings=replace(job.settings, data_parallel=parallel))
    for other in (recorded.job("gpipe", 2, 4), apart):  # who reduces nothing is not told of it
        alone = Measure(other)
        alone.add(last_step(job.compute, other.replicas))
        assert alone.overlap is None


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipe_v"])
@pytest.mark.slow(keep=2)
def test_a_run_records_when_each_bucket_was_ready(schedule: str) -> None:
    wanted = settings(schedule, 2, 4, replicas=2, steps=2, model=MLP, allreduce=EVERY_GRADIENT)
    ran = run_threads(replace(wanted, schedule={"name": schedule}))
    for rank, worker in ran.workers.items():
        spans = np.concatenate([r.arrays["spans"] for r in ran.records if r.kind == "step" and r.meta["rank"] == rank])
        queued, reduced = (spans[spans[:, 0] == kind] for kind in (Kind.QUEUED, Kind.REDUCE))
        buckets = sum(len(reducer.buckets) for reducer in worker.reducers.values())
        assert len(queued) == len(reduced) == 2 * buckets
        assert (queued[:, 3] <= queued[:, 4]).all() and (queued[:, 4] == reduced[:, 3]).all()
