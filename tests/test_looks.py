"""Which traced steps are looked at while a run goes on, and which at its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import recorded
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.timeline import Kind, Span, Timeline
from engine.report import looks
from engine.report.bubble import Account
from engine.report.gather import Step, Steps
from engine.report.looks import Looks
from engine.report.measure import Measure


@dataclass
class Run:
    """Steps of `seconds` each, looked at by something that takes `cost` seconds of a processor."""

    seconds: float = 1.0
    cost: float = 0.0
    clock: float = 0.0
    looked: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    live: int = 0  # how many of `looked` were looked at before the end

    def of(self, steps: int, spans: int = 1, traced: int = 1) -> Run:
        def look(step: Step, account: Account | None) -> None:
            self.looked.append(step.index)
            self.clock += self.cost

        found = Looks(look, lambda step: self.counted.append(step.index), lambda: self.clock)
        timeline = Timeline.of([Span(0, Kind.F, 0, 0, 0, 1)] * spans, [[0, 1]], measured=True)
        step = Steps(recorded.job("gpipe", 1, 1)).add(recorded.step_records(recorded.job("gpipe", 1, 1), 0)[0])
        assert step is not None
        for index in range(steps):
            traced_now = timeline if index % traced == 0 else None
            found.add(replace(step, index=index, seconds=self.seconds, timeline=traced_now))
        self.live = len(self.looked)
        found.finish()
        return self


def test_where_there_is_time_every_traced_step_is_looked_at_as_it_comes() -> None:
    run = Run(seconds=1.0, cost=looks.SHARE).of(1000)
    assert run.looked == list(range(1000)) and run.live == 1000 and not run.counted
    assert Run(seconds=1.0, cost=0.0).of(100, traced=7).looked == list(range(0, 100, 7))


@given(st.floats(1e-4, 10), st.floats(1e-4, 1), st.integers(1, 400), st.integers(1, 5))
def test_looking_takes_a_small_share_of_a_run_and_the_newest_is_never_missing(
    seconds: float, cost: float, steps: int, traced: int
) -> None:
    run = Run(seconds, cost).of(steps, traced=traced)
    assert (run.live - 1) * cost <= looks.SHARE * steps * seconds * (1 + 1e-9)
    assert run.looked[0] == 0 and run.looked[-1] == (steps - 1) // traced * traced
    assert run.looked == sorted(run.looked)  # no curve folds back
    everything = run.looked + run.counted
    assert len(everything) == len(set(everything)) <= run.live + looks.MOST_STEPS + 1


@pytest.mark.parametrize("steps", [2, 20, looks.MOST_STEPS])
def test_of_a_short_run_nothing_is_missing(steps: int) -> None:
    run = Run(seconds=1e-3, cost=5e-6 * 3).of(steps)
    assert sorted(run.looked + run.counted) == list(range(steps))


def test_what_waits_is_spread_over_the_run() -> None:
    run = Run(seconds=1e-3, cost=1e6).of(10_000)
    waited = run.looked[1:]
    assert run.live == 1 and looks.MOST_STEPS / 2 <= len(waited) <= looks.MOST_STEPS + 1
    gaps = [later - earlier for earlier, later in pairwise(waited)]
    assert len(set(gaps[:-1])) == 1 and 0 < gaps[-1] <= gaps[0] and waited[0] <= gaps[0]


def test_large_steps_wait_in_smaller_numbers() -> None:
    run = Run(seconds=1e-3, cost=1e6).of(100, spans=looks.MOST_SPANS // 10)
    assert 5 <= len(run.looked) <= 12 and run.looked[-1] == 99


def test_steps_are_counted_in_any_order_and_the_latest_is_the_last() -> None:
    of = recorded.job("gpipe", 2, 4)
    timelines = [recorded.measured(of.compute, n * recorded.costs(of.compute), step=recorded.MS) for n in (1, 2, 3, 4)]
    in_turn, mixed = Measure(of), Measure(of)
    for step in range(4):
        in_turn.add(timelines[step], step)
    for step in (0, 3, 1, 2):
        mixed.add(timelines[step], step)
    assert mixed.last is mixed.last_whole is timelines[3]
    assert mixed.waterfall == in_turn.waterfall
    one, other = in_turn.result(), mixed.result()
    assert one is not None and other is not None and one.waterfall is not None and other.waterfall is not None
    assert one.waterfall.bars == other.waterfall.bars and one.measured == pytest.approx(other.measured)
