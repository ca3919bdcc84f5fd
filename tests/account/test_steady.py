"""The account of an asynchronous run: update by update, with what the update before has sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import recorded

from engine.account.cause import causes
from engine.account.steady import SteadyMeasure
from engine.categories import NAMES
from engine.plan.timeline import Kind, Span, Timeline
from engine.report.text import waterfall_text
from engine.tables import table


def update(k: int, start: int | None = None) -> Timeline:
    """Update k of two ranks, 100 ns long: rank 0 sends F of k+1, for which rank 1 waits at the beginning of k+1."""
    at = 100 * k if start is None else start
    spans = [
        Span(0, Kind.F, 0, k + 1, at + 10, at + 40),
        Span(0, Kind.SEND_F, 0, k + 1, at + 40, at + 41),
        Span(0, Kind.WAIT_B, 0, k, at + 41, at + 65),
        Span(0, Kind.B, 0, k, at + 65, at + 95),
        Span(0, Kind.STEP, -1, k, at + 95, at + 100),
        Span(1, Kind.WAIT_F, 1, k, at, at + 10),
        Span(1, Kind.F, 1, k, at + 10, at + 30),
        Span(1, Kind.B, 1, k, at + 30, at + 60),
        Span(1, Kind.SEND_B, 1, k, at + 60, at + 61),
        Span(1, Kind.STEP, -1, k, at + 95, at + 100),
    ]
    return Timeline.of(spans, [[at, at + 100]] * 2, measured=True)


def measure(*windows: int) -> SteadyMeasure:
    return SteadyMeasure(replace(recorded.job("pipedream", 2, 4), windows=windows))


def named(measured: SteadyMeasure, step: int, rank: int) -> dict[str, int]:
    row = measured.add(update(step), step).table[rank].tolist()
    assert sum(row) == 100
    return {name: ns for name, ns in zip(NAMES, row, strict=True) if ns}


def test_a_message_of_the_update_before_was_under_way() -> None:
    """And waiting at the beginning of an update is no filling, but for the first of a window."""
    measured = measure(3, 3)
    assert named(measured, 0, rank=1)["fill"] == 10
    for step in (1, 2):
        found = named(measured, step, rank=1)
        assert found["transfer"] == 10
        assert "fill" not in found
        assert "stall" not in found
    assert named(measured, 3, rank=1)["fill"] == 10  # the pipeline has drained before


def test_a_wait_within_an_update_is_cut_where_its_message_was_sent() -> None:
    measured = measure(10)
    named(measured, 0, rank=0)
    found = named(measured, 1, rank=0)
    assert (found["stall"], found["transfer"], found["optimizer"], found["compute"]) == (19, 5, 5, 60)


@pytest.mark.parametrize(("window", "steps", "steady"), [(10, 6, True), (4, 4, False)])
def test_the_first_and_the_last_updates_are_left_out(window: int, steps: int, steady: bool) -> None:
    """Twice as many as there are ranks; where nothing else is there, all count."""
    measured = measure(window)
    assert measured.result() is None
    for step in range(window):
        measured.add(update(step), step)
    found = measured.result()
    assert found is not None
    assert (found.steps, found.steady) == (steps, steady)
    assert found.per_rank.tolist() == pytest.approx([0.4, 0.5])
    assert found.costs is not None
    assert found.costs[:2, :, 0].tolist() == pytest.approx(np.array([[30, 20], [30, 30]]) * 1e-9)
    assert found.ideal == pytest.approx(0, abs=1e-9)
    assert found.predicted == pytest.approx((0 + 1 / 6) / 2)
    assert found.latency[0] == pytest.approx(5e-9)


def test_causes_add_up_to_the_bubble_of_the_steady_state() -> None:
    """The last stage takes 60 ns of 100, the first 50: with messages of 5 ns or without."""
    measured = measure(10)
    for step in range(10):
        measured.add(update(step), step)
    found = measured.result()
    assert found is not None and found.predicted is not None and found.with_transfer is not None
    told = causes(found)
    step = float(found.seconds.sum(axis=1).mean())
    assert step == pytest.approx(100e-9)
    assert sum(told.values()) == pytest.approx(found.measured * step)
    assert told["imbalance"] == pytest.approx(found.predicted * step) and told["optimizer"] == pytest.approx(5e-9)
    assert told["transfer"] == pytest.approx((found.with_transfer - found.predicted) * step)


def test_the_report_says_why_there_is_no_waterfall_and_what_the_bubble_is_made_of() -> None:
    measured, of = measure(10), replace(recorded.job("pipedream", 2, 4), windows=(10,))
    for step in range(10):
        measured.add(update(step), step)
    found = measured.result()
    assert found is not None
    said = waterfall_text(of, found, 10, table)
    assert "updates of pipedream overlap" in said
    rows = {words[0]: words[1:] for line in said.splitlines() if (words := line.split())}
    shares = [float(rows[name][0]) for name in ("schedule", "imbalance", "transfer", "rest")]
    assert sum(shares) == pytest.approx(100 * found.measured, abs=0.2) == pytest.approx(float(rows["rest"][2]), abs=0.1)


def test_a_gap_in_what_was_traced_is_no_message() -> None:
    """trace.every=2: what the update between has sent was not seen; but the pipeline was as full as ever."""
    measured = measure(10)
    named(measured, 0, rank=1)
    row = named(measured, 2, rank=1)
    assert row["stall"] == 10 and not {"fill", "transfer"} & set(row)


def test_the_picture_shows_some_updates_at_once() -> None:
    measured = measure(30)
    for step in range(20):
        measured.add(update(step), step)
    assert measured.last is not None
    assert measured.last.windows.tolist() == [[1500, 2000]] * 2
    assert len(measured.last) == 5 * 10
