"""trace.json: one file and one clock for all ranks, lanes that nest, arrows that never run backwards in time."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import recorded
from recorded import MS, costs, measured

from engine.plan.timeline import Kind, Span, Timeline
from engine.report.perfetto import trace_events, write_trace

Events = list[dict[str, Any]]
START = 3_600_000_000_000_123  # an hour of a machine's uptime: not a round number of microseconds


def written(tmp_path: Path, timeline: Timeline, ranks: int) -> Events:
    write_trace(tmp_path / "trace.json", timeline, ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    events: Events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return events


def of_kind(events: Events, phase: str) -> Events:
    """Without the critical path, which is a process of its own."""
    return [event for event in events if event["ph"] == phase and event.get("cat") != "critical path"]


def names(events: Events, what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in of_kind(events, "M") if e["name"] == what}


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches", "replicas"), [(4, 4, 1), (2, 3, 2), (1, 2, 1)])
def test_every_message_has_an_arrow_that_keeps_causality(
    schedule: str, ranks: int, microbatches: int, replicas: int, tmp_path: Path
) -> None:
    of = recorded.job(schedule, ranks, microbatches, replicas)
    timeline = measured(of.compute, costs(of.compute), replicas, transfer=MS, start=START)
    events = written(tmp_path, timeline, ranks)
    slices = of_kind(events, "X")
    starts = {event["id"]: event for event in of_kind(events, "s")}
    ends = {event["id"]: event for event in of_kind(events, "f")}
    assert starts.keys() == ends.keys() and len(starts) == 2 * (ranks - 1) * microbatches * replicas
    for number, start in starts.items():
        end = ends[number]
        assert end["ts"] >= start["ts"] + 1000  # the transfer
        assert end["pid"] // ranks == start["pid"] // ranks and abs(end["pid"] - start["pid"]) == 1
        sent, used = (at(slices, event) for event in (start, end))
        assert "SEND" in sent["name"] and used["cat"] == "compute"
        assert sent["args"]["microbatch"] == used["args"]["microbatch"]
        assert sent["args"]["stage"] + (1 if "SEND_F" in sent["name"] else -1) == used["args"]["stage"]


def at(slices: Events, arrow: dict[str, Any]) -> dict[str, Any]:
    """The slice that an end of an arrow binds to: one of its lane that begins just there."""
    (found,) = [s for s in slices if (s["pid"], s["tid"], s["ts"]) == (arrow["pid"], arrow["tid"], arrow["ts"])]
    return found


def test_slices_of_a_lane_nest() -> None:
    of = recorded.job("1f1b", 4, 8)
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in of_kind(trace_events(measured(of.compute, costs(of.compute), step=MS, start=START), 4), "X"):
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= end


def test_names_lanes_and_processes() -> None:
    of = recorded.job("gpipe", 2, 1, replicas=2)
    timeline = measured(of.compute, costs(of.compute), 2, transfer=MS, step=MS)
    behind = [Span(3, Kind.QUEUED, 1, -1, 2, 3), Span(3, Kind.REDUCE, 1, -1, 3, 5)]
    spans = [*timeline, *behind, Span(3, Kind.WAIT_DATA, -1, -1, 0, 5)]
    events = trace_events(Timeline.of(spans, timeline.windows.tolist(), measured=True), 2)
    assert [names(events, "process_name")[pid, 0] for pid in range(4)] == [
        "rank 0 (replica 0)",
        "rank 1 (replica 0)",
        "rank 0 (replica 1)",
        "rank 1 (replica 1)",
    ]
    lanes = names(events, "thread_name")
    shown = {(e["name"], lanes[e["pid"], e["tid"]]) for e in of_kind(events, "X") if e["pid"] == 3}
    assert shown == {
        ("1WAIT_F0", "wait"),
        ("1F0", "compute"),
        ("1B0", "compute"),
        ("1SEND_B0", "send/receive"),
        ("1STEP", "step"),
        ("1REDUCE", "reduce"),
        ("WAIT_DATA", "wait"),
    }
    assert [(e["pid"], e["tid"], e["name"], e["ts"]) for e in of_kind(events, "i")] == [(3, 3, "1READY", 0.002)]


def test_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    spans = [Span(0, Kind.F, 0, 0, START, START + 1001), Span(0, Kind.B, 0, 0, START + 1002, START + 10**12 + 3)]
    events = written(tmp_path, Timeline.of(spans, [[START, START + 10**12]], measured=True), 1)
    first, second = of_kind(events, "X")
    assert (first["ts"], first["dur"], second["ts"]) == (0, 1.001, 1.002)
    assert round(1000 * (second["ts"] + second["dur"])) == 10**12 + 3


def test_times_rise_and_slices_come_before_their_arrows() -> None:
    """Readers bind an arrow to a slice that they have already seen."""
    of = recorded.job("1f1b", 3, 3)
    timed = [e for e in trace_events(measured(of.compute, costs(of.compute)), 3) if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    for before, after in itertools.pairwise(timed):
        assert not (before["ts"] == after["ts"] and after["ph"] == "X" and before["ph"] != "X")


def test_a_step_without_spans_is_a_trace_all_the_same(tmp_path: Path) -> None:
    assert of_kind(written(tmp_path, Timeline.of([], [[0, 1]], measured=True), 1), "X") == []


def test_the_critical_path_is_a_process_of_its_own() -> None:
    of = recorded.job("gpipe", 2, 2)
    events = trace_events(measured(of.compute, costs(of.compute, slow=1), transfer=MS, step=MS, start=START), 2)
    path = [e for e in events if e.get("cat") == "critical path"]
    assert {e["pid"] for e in path} == {2} and names(events, "process_name")[2, 0] == "critical path"
    assert [e["name"] for e in path] == [
        "0F0", "transfer to 1F0", "1F0", "1F1", "1B0", "1B1", "transfer to 0B1", "0B1", "optimizer",
    ]  # fmt: skip
    for before, after in itertools.pairwise(path):
        assert round(1000 * (before["ts"] + before["dur"])) == round(1000 * after["ts"])
    assert {e["args"]["cause"] for e in path} == {"compute", "transfer", "optimizer"}
