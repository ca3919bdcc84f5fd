"""Which traced steps are looked at while a run goes on, and which at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.report.tensorboard import trace_budget
from engine.report.tensorboard.trace_budget import TraceBudget


@dataclass
class Run:
    """Steps of `seconds` each, looked at by something that takes `cost` seconds of a processor."""

    seconds: float = 1.0
    cost: float = 0.0
    clock: float = 0.0
    looked: list[int] = field(default_factory=list)
    live: int = 0  # how many of `looked` were looked at before the end
    behind: list[int] = field(default_factory=list)  # after each step, how far the last that was looked at lies back

    def of(self, steps: int, spans: int = 1, traced: int = 1) -> Run:
        def look(step: int) -> None:
            self.looked.append(step)
            self.clock += self.cost

        found = TraceBudget(look, lambda: self.clock)
        for index in range(steps):
            found.passed(self.seconds)
            if index % traced == 0:
                found.add(index, spans)
            self.behind.append(index - self.looked[-1])
        self.live = len(self.looked)
        found.finish()
        return self


def test_where_there_is_time_every_traced_step_is_looked_at_as_it_comes() -> None:
    run = Run(seconds=1.0, cost=trace_budget.SHARE).of(1000)
    assert run.looked == list(range(1000)) and run.live == 1000
    assert Run(seconds=1.0, cost=0.0).of(100, traced=7).looked == list(range(0, 100, 7))


@given(st.floats(1e-4, 10), st.floats(1e-4, 1), st.integers(1, 400), st.integers(1, 5))
def test_looking_takes_a_small_share_of_a_run_and_the_newest_is_never_missing(
    seconds: float, cost: float, steps: int, traced: int
) -> None:
    run = Run(seconds, cost).of(steps, traced=traced)
    assert (run.live - 1) * cost <= trace_budget.SHARE * steps * seconds * (1 + 1e-9)
    assert run.looked[0] == 0 and run.looked[-1] == (steps - 1) // traced * traced
    assert all(a < b for a, b in pairwise(run.looked))  # no curve folds back
    assert len(run.looked) <= run.live + trace_budget.MOST_STEPS + 1


@given(st.integers(1, trace_budget.MOST_STEPS + 1), st.floats(1e-4, 1))
def test_of_a_short_run_nothing_is_missing(steps: int, cost: float) -> None:
    assert Run(seconds=1e-3, cost=cost).of(steps).looked == list(range(steps))


def test_what_waits_is_spread_over_the_run() -> None:
    run = Run(seconds=1e-3, cost=1e6).of(10_000)
    waited = run.looked[1:]
    assert run.live == 1 and trace_budget.MOST_STEPS / 2 <= len(waited) <= trace_budget.MOST_STEPS + 1
    gaps = [later - earlier for earlier, later in pairwise(waited)]
    assert len(set(gaps[:-1])) == 1 and 0 < gaps[-1] <= gaps[0] and waited[0] <= gaps[0]


@pytest.mark.parametrize("times", [3, 6, 20])
def test_where_time_is_short_the_last_look_is_not_far_behind(times: int) -> None:
    """A look takes what `times` steps allow."""
    run = Run(seconds=1.0, cost=times * trace_budget.SHARE).of(6000)
    assert max(run.behind) <= (trace_budget.MOST_STEPS + 2) * times
    assert max(run.behind[4000:]) <= 3 * times


def test_large_steps_wait_in_smaller_numbers() -> None:
    run = Run(seconds=1e-3, cost=1e6).of(100, spans=trace_budget.MOST_SPANS // 10)
    assert 5 <= len(run.looked) <= 12 and run.looked[-1] == 99
