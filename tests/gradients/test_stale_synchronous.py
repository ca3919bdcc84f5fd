"""The book-keeping of asynchronous updates, driven in any order: its bounds hold, and somebody can always go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gradients.servers.stale_synchronous import StaleSynchronous


class Driven:
    """Workers that push and read in the order that `choices` says; every event is checked."""

    def __init__(self, workers: int, bound: int | None) -> None:
        self.pace, self.bound, self.workers = StaleSynchronous(workers, bound), bound, workers
        self.read: dict[int, int | None] = dict.fromkeys(range(workers), 0)  # None: pushed, and not read since
        self.staleness: list[int] = []

    def ready(self) -> list[int]:
        """Workers that can do something."""
        can = self.pace.may_read, self.pace.may_push
        return [w for w, read in self.read.items() if can[read is not None](w)]

    def act(self, worker: int) -> None:
        read = self.read[worker]
        if read is None:
            lead = self.pace.clock[worker] - min(self.pace.clock)
            assert self.bound is None or lead <= self.bound
            self.read[worker] = self.pace.read(worker)
        else:
            between = self.pace.version - read
            self.staleness.append(self.pace.push(worker, read))
            assert self.staleness[-1] == between
            self.read[worker] = None


@given(st.integers(1, 5), st.none() | st.integers(0, 4), st.lists(st.integers(0, 2**16), max_size=200))
def test_bounds_hold_whoever_comes_first(workers: int, bound: int | None, choices: list[int]) -> None:
    run = Driven(workers, bound)
    for choice in choices:
        ready = run.ready()
        assert ready, "everybody is held back"
        run.act(ready[choice % len(ready)])
    assert run.pace.version == sum(run.pace.clock) == len(run.staleness)
    if bound is not None:
        assert max(run.staleness, default=0) <= (workers - 1) * (2 * bound + 1)
        assert max(run.pace.clock) - min(run.pace.clock) <= bound + 1
    else:
        assert len(run.ready()) == workers


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_on_staleness_is_reached(workers: int, bound: int) -> None:
    """Worker 0 reads when it is as far ahead as it may be; then the others overtake it by as much, and push."""
    run = Driven(workers, bound)
    while run.pace.clock[0] < bound or run.read[0] is None:
        run.act(0)
    others = range(1, workers)
    while any(other in run.ready() for other in others):
        run.act(next(other for other in others if other in run.ready()))
    run.act(0)
    assert run.staleness[-1] == (workers - 1) * (2 * bound + 1)


@given(st.integers(1, 5), st.lists(st.integers(0, 2**16), min_size=1, max_size=120))
def test_with_a_bound_of_zero_all_read_the_same_version(workers: int, choices: list[int]) -> None:
    """So the gradients of a step are all computed from the weights of the one before: synchronous training."""
    run = Driven(workers, 0)
    for choice in choices:
        ready = run.ready()
        worker = ready[choice % len(ready)]
        reads = run.read[worker] is None
        run.act(worker)
        assert not reads or run.read[worker] == workers * run.pace.clock[worker]


def test_where_all_meet_nobody_leaves_before_the_last_has_come() -> None:
    pace = StaleSynchronous(3, None)
    for worker in (0, 1):
        pace.push(worker, 0)
        assert pace.may_read(worker) and not pace.may_read(worker, meeting=True)
    pace.push(2, 0)
    assert all(pace.may_read(worker, meeting=True) for worker in range(3))
    assert [pace.read(worker, meeting=True) for worker in (0, 1)] == [3, 3]
    assert not pace.may_push(0)  # worker 2 would read something else than the others
    assert pace.read(2, meeting=True) == 3
    assert all(pace.may_push(worker) for worker in range(3))
