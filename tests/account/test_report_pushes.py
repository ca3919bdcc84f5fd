"""What a run with asynchronous replicas reports: the pace of each, how stale its pushes were, and no barrier."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import recorded
from recorded import MS, costs, measured, recorder

from engine.account.records.gather import AHEAD, Steps
from engine.account.records.pushes import Pushed, Staleness, pace_rows, staleness_rows, together
from engine.job import Job
from engine.plan.timeline import Kind, Span, Timeline
from engine.settings import DataParallelSettings
from engine.telemetry.records import Record


def asynchronous(ranks: int = 2, replicas: int = 2, max_staleness: int | None = None) -> Job:
    of = recorded.job("gpipe", ranks, 4, replicas)
    chosen = DataParallelSettings(replicas, "async", max_staleness)
    return replace(of, settings=replace(of.settings, data_parallel=chosen))


def step_records(of: Job, step: int, staleness: list[int], seconds: list[float], held_ms: int = 0) -> list[Record]:
    """Untraced: replica r takes seconds[r], its pushes to the server of each stage are staleness[r] updates old."""
    records = []
    for record in recorded.step_records(of, step):
        replica, stage = divmod(record.meta["rank"], of.ranks)
        begun = int(step * seconds[replica] * 1e9)
        window = [begun, begun + int(seconds[replica] * 1e9)]
        pushes = np.array([[stage, 0, 10, 10 + staleness[replica], held_ms * MS * replica]])
        arrays = record.arrays | {"pushes": pushes}
        records.append(record._replace(meta=record.meta | {"window": window}, arrays=arrays))
    return records


def test_the_summary_has_the_pace_and_the_staleness_of_each_replica(tmp_path: Path) -> None:
    of = asynchronous(max_staleness=4)
    record, console = recorder(of, tmp_path, progress=False)
    for step, stale in enumerate([0, 1, 1, 3]):
        for each in step_records(of, step, [stale, 0], [0.1, 0.3], held_ms=50):
            record(each)
    summary = record.finish("completed")
    told = summary["data_parallel"]
    assert (told["mode"], told["max_staleness"]) == ("async", 4) and "barrier" not in told
    fast, slow = told["replicas"]
    assert fast["staleness"] == {"mean": 1.25, "max": 3, "histogram": {"0": 2, "1": 4, "3": 2}}
    assert slow["staleness"] == {"mean": 0.0, "max": 0, "histogram": {"0": 8}}
    assert [fast["step_time"], slow["step_time"]] == pytest.approx([0.1, 0.3])
    assert [fast["held_back"], slow["held_back"]] == pytest.approx([0.0, 0.05])
    assert summary["samples_per_second"] == pytest.approx(64 / 2 * (1 / 0.1 + 1 / 0.3))  # what both do in a second
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    for text in (console.getvalue(), (tmp_path / "report.txt").read_text()):
        assert "This is not the synchronous optimisation" in text and "up to 3 updates old" in text
        assert "replicas 2 (asynchronous)" in text and "more than 4 ahead of the slowest" in text
        assert "wasted" not in text


def test_the_bound_is_only_spoken_of_where_there_is_one(tmp_path: Path) -> None:
    of = asynchronous()
    record, console = recorder(of, tmp_path, progress=False)
    for each in step_records(of, 0, [0, 1], [0.1, 0.1]):
        record(each)
    record.finish("completed")
    assert "Replicas did not wait for each other." in console.getvalue() and "ahead of" not in console.getvalue()


def test_together_is_what_all_do_at_their_own_pace() -> None:
    assert together([Pushed(0.1, (), 0.0), Pushed(0.1, (), 0.0)]) == pytest.approx(0.1)
    assert together([Pushed(0.05, (), 0.0), Pushed(0.15, (), 0.0)]) == pytest.approx(0.075)


def test_tables_have_a_row_per_replica_and_per_range_of_staleness() -> None:
    found = Staleness(asynchronous(1, 3))
    for step in range(3):
        found.add([Pushed(0.1, (0,), 0.0), Pushed(0.2, (5 + step,), 0.01), Pushed(0.2, (5000,), 0.0)])
    told = found.summary()
    assert pace_rows(told)[1] == ["0", "100.0", "10.00", "0.0", "0.00", "0"]
    assert pace_rows(told)[2] == ["1", "200.0", "5.00", "10.0", "6.00", "7"]
    assert staleness_rows(told) == [
        ["staleness", "replica 0", "replica 1", "replica 2"],
        ["0", "3", "0", "0"],
        ["4-5", "0", "1", "0"],
        ["6-7", "0", "2", "0"],
        ["1024-", "0", "0", "3"],
    ]


def traced(of: Job, step: int, starts: list[int]) -> list[Record]:
    """A traced step that replica r begins at starts[r] ns."""
    spans: list[Span] = []
    windows = []
    for replica, start in enumerate(starts):
        own = measured(of.compute, costs(of.compute), 1, start=start, step=MS)
        spans += [span._replace(rank=span.rank + replica * of.ranks) for span in own]
        windows += own.windows.tolist()
    timeline = Timeline.of(spans, windows, measured=True)
    records = recorded.step_records(of, step, timeline)
    nothing = np.zeros((0, 5), dtype=np.int64)
    return [record._replace(arrays=record.arrays | {"pushes": nothing}) for record in records]


def test_a_traced_step_is_accounted_for_on_every_rank_and_shown_of_one_replica(tmp_path: Path) -> None:
    """Replica 1 is a second behind: its step is no part of the time that replica 0's takes."""
    of = asynchronous()
    record, _ = recorder(of, tmp_path, progress=False)
    for step in range(3):
        begun = step * 31 * MS
        for each in traced(of, step, [begun, begun + 1000 * MS]):
            record(each)
    summary = record.finish("completed")
    assert len(summary["bubble"]["per_rank"]) == 4
    assert [entry["compute"] for entry in summary["bubble"]["per_rank"]] == pytest.approx([0.024] * 4)
    assert summary["waterfall"]["measured"] == pytest.approx(0.031)
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert {name for name in named if name.startswith("rank")} == {"rank 0", "rank 1"}


def test_the_first_ranks_of_a_timeline_keep_their_pairs() -> None:
    spans = [Span(rank, Kind.F, 0, m, m, m + 1) for rank in (1, 0) for m in range(3)]
    whole = replace(Timeline.of(spans, [[0, 3]] * 2, measured=True), pairs=np.array([[0, 1], [4, 5]]))
    first = whole.first(1)
    assert first.ranks == 1 and len(first) == 3 and set(first.rank.tolist()) == {0}
    assert first.pairs.tolist() == [[1, 2]]
    assert whole.first(2) is whole


def test_of_a_replica_that_is_far_ahead_only_figures_are_held() -> None:
    of = asynchronous(1, 2)
    steps = Steps(of)
    records = [traced(of, step, [step * 31 * MS, 0]) for step in range(AHEAD + 5)]
    for fast, _ in records:
        assert steps.add(fast) is None
    held = [sum(len(r.arrays["spans"]) for r in ranks.values()) > 0 for ranks in steps._pending.values()]
    assert held == [True] * (AHEAD + 1) + [False] * 4
    done = [steps.add(slow) for _, slow in records]
    assert [step is not None and step.recorded is not None for step in done] == held
    assert all(step is not None and step.seconds > 0 for step in done)
