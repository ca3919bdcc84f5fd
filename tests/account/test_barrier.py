"""What replicas waste at the barrier: exactly what the slower one takes longer, whatever the reduction costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import recorder
from virtual import MS, Virtual

from engine.account.barrier import Barrier, barrier
from engine.account.bubble import account
from engine.categories import NAMES
from engine.plan.actions import Op
from engine.plan.schedules import build
from engine.plan.timeline import Kind, Span, Timeline
from engine.report.text import barrier_text


def slowed(schedule: str, ranks: int, late: dict[int, int], reduce: int, count: int = 0, **sizes: int) -> Virtual:
    """Replicas of a pipeline; every forward of replica r takes late[r] ns longer."""
    replicas = max(late) + 1

    def action(rank: int, op: Op, stage: int, microbatch: int, step: int) -> int:
        return 2 * MS + (late[rank // ranks] if op is Op.F else 0)

    program = build(schedule, ranks, sizes.get("microbatches", 4))
    return Virtual(program, replicas, action=action, reduce=lambda stage: reduce, count=count)


def test_the_fast_replica_waits_for_as_long_as_the_other_takes_longer() -> None:
    timeline = slowed("gpipe", 1, {0: 0, 1: 5 * MS}, reduce=3 * MS).timelines()[-1]
    assert barrier(timeline, 1).tolist() == [[4 * 5 * MS, 3 * MS], [0, 3 * MS]]


def test_each_of_several_waits_for_the_slowest() -> None:
    timeline = slowed("1f1b", 1, {0: MS, 1: 3 * MS, 2: 0}, reduce=MS).timelines()[-1]
    assert barrier(timeline, 1)[:, 0].tolist() == [4 * 2 * MS, 0, 4 * 3 * MS]


def test_a_reduction_that_is_hidden_is_no_waste() -> None:
    timeline = slowed("gpipe", 1, {0: 0, 1: 0}, reduce=0).timelines()[-1]
    assert not barrier(timeline, 1).any()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "zb_h1"]), st.integers(1, 3),
    st.lists(st.integers(0, 6), min_size=2, max_size=3), st.integers(0, 9), st.integers(0, 3),
)  # fmt: skip
@pytest.mark.slow
def test_both_parts_are_what_the_account_calls_reduce(
    schedule: str, ranks: int, late: list[int], reduce: int, count: int
) -> None:
    run = slowed(schedule, ranks, {r: ms * MS for r, ms in enumerate(late)}, reduce * MS, count * MS)
    for timeline in run.timelines()[1:]:
        found, column = barrier(timeline, ranks), account(timeline, ranks, ranks).table[:, NAMES.index("reduce")]
        assert found.sum(axis=1).tolist() == column.tolist()
        assert (found >= 0).all()


def test_shards_that_are_awaited_at_the_beginning_were_late_by_the_other_optimizer() -> None:
    """Replica 1 begins the step, which is when its update is done, at 7; only then can its shard come, at 9."""
    spans = [Span(0, Kind.WAIT_GATHER, 0, -1, 2, 9)]
    spans += [
        Span(rank, kind, 0, 0, start, start + 5) for rank in (0, 1) for kind, start in ((Kind.F, 9), (Kind.B, 14))
    ]
    timeline = Timeline.of(spans, [[0, 30], [7, 30]], measured=True)
    assert barrier(timeline, 1).tolist() == [[5, 2], [0, 0]]


def test_the_run_reports_what_each_replica_wasted(tmp_path: Path) -> None:
    of = recorded.job("gpipe", 1, 4, replicas=2)
    record, console = recorder(of, tmp_path, progress=False)
    timelines = slowed("gpipe", 1, {0: 0, 1: 5 * MS}, reduce=4 * MS).timelines()
    for step, timeline in enumerate(timelines):
        for each in recorded.step_records(of, step, timeline):
            record(each)
    summary = record.finish("completed")
    fast, slow = summary["data_parallel"]["barrier"]
    window = summary["step_time"]["median"]
    assert fast == {"waiting": 0.02, "share": pytest.approx(0.02 / window), "reducing": pytest.approx(0.004)}
    assert slow == {"waiting": 0.0, "share": 0.0, "reducing": pytest.approx(0.004)}
    sentence = "Waiting for slower replicas, replica 0 wasted 20.0 ms of a step"
    assert sentence in console.getvalue() and sentence in (tmp_path / "report.txt").read_text()


def test_the_first_step_warms_up() -> None:
    of = recorded.job("gpipe", 1, 4, replicas=2)
    found = Barrier(of)
    assert found.result() == []
    warm, *rest = slowed("gpipe", 1, {0: 0, 1: 5 * MS}, reduce=MS).timelines()
    found.add(warm)
    assert found.result()[0]["waiting"] == pytest.approx(0.02)
    for timeline in rest:
        found.add(timeline)
    assert found.result()[0]["waiting"] == pytest.approx(0.02)


def test_of_many_replicas_the_sentence_names_two() -> None:
    waits = [{"waiting": r * 1e-3, "share": r / 100, "reducing": 0.0} for r in (3, 0, 5, 1, 2)]
    said = barrier_text(waits)
    assert said == (
        "Waiting for slower replicas, replica 2 wasted 5.0 ms of a step (5.0 %), replica 1 wasted 0.0 ms of a step "
        "(0.0 %), others between."
    )


def test_one_replica_has_no_barrier(tmp_path: Path) -> None:
    record, _ = recorder(recorded.job(), tmp_path, progress=False)
    assert record.finish("completed")["data_parallel"] is None
