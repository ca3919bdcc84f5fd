"""Lines through measured costs: exact where costs are linear, never negative, and none through sizes too near."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.predict.fits import FIXED, PROPORTIONAL, TELLING, fit, telling

PARTS = st.floats(0, 1e3, allow_subnormal=False).filter(lambda x: x == 0 or x > 1e-6)


@given(fixed=PARTS, slope=PARTS, sizes=st.lists(st.integers(1, 1000), min_size=2, max_size=6))
def test_linear_costs_are_found_exactly(fixed: float, slope: float, sizes: list[int]) -> None:
    found = fit([(size, fixed + slope * size) for size in sizes])
    if not telling(sizes):
        assert found is None
        return
    assert found is not None
    for size in (1, 7, 2000):
        assert found.at(size) == pytest.approx(fixed + slope * size, rel=1e-6, abs=1e-6 * (fixed + slope * max(sizes)))


@given(points=st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e3)), min_size=2, max_size=8))
def test_no_part_of_a_line_is_negative(points: list[tuple[float, float]]) -> None:
    found = fit(points)
    if found is not None:
        assert found.fixed >= 0 and found.per_unit >= 0
        low, high = min(cost for _, cost in points), max(cost for _, cost in points)
        assert found.at(min(size for size, _ in points)) <= high * (1 + 1e-9) + 1e-9
        assert found.at(max(size for size, _ in points)) >= low * (1 - 1e-9) - 1e-9


@pytest.mark.parametrize("sizes", [[], [4.0], [4.0, 4.0], [8.0, 7.0], [3.0, 3.0 * TELLING - 0.01]])
def test_sizes_that_are_too_near_tell_nothing(sizes: list[float]) -> None:
    assert not telling(sizes)
    assert not sizes or fit([(size, 1.0) for size in sizes]) is None


def test_what_falls_with_size_is_taken_as_fixed_and_what_begins_below_nothing_as_proportional() -> None:
    assert fit([(1, 3.0), (2, 1.0)]) is not None and fit([(1, 3.0), (2, 1.0)]).at(100) == 2.0  # type: ignore[union-attr]
    through = fit([(1, 1.0), (2, 4.0)])
    assert through is not None and through.fixed == 0 and through.per_unit == pytest.approx(9 / 5)


def test_the_two_ends() -> None:
    assert FIXED.ratio(8, 2) == 1 and PROPORTIONAL.ratio(8, 2) == 4
