"""Bubbles and peaks of the schedules are those of the literature: tables, and closed forms where they are stated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.actions import Program
from engine.plan.lowering import lower
from engine.plan.schedules import build
from engine.plan.simulate import Costs, Figures, figures, simulate
from engine.plan.verify import peak_in_flight, peak_kept, verify

UNEVEN = {"forward": 1, "input_backward": 1.2, "weight_backward": 0.8}
HALVES = {"forward": 2, "input_backward": 1, "weight_backward": 1}  # F as long as the whole backward

costs = st.floats(0.1, 10)
three = st.tuples(costs, costs, costs)
rank_counts = st.integers(1, 7)


def simulated(program: Program, **settings) -> Figures:
    return figures(program, simulate(program, Costs.from_settings(settings, program.placement, program.microbatches)))


def bubble(program: Program, forward: float, half: float, weight: float) -> float:
    """The largest rank cost beyond what a rank has to do."""
    found = simulated(program, forward=forward, input_backward=half, weight_backward=weight)
    return found.bubble_cost - program.microbatches * (forward + half + weight)


@pytest.mark.parametrize(
    ("name", "cost", "rate", "makespan", "uneven", "uneven_makespan", "kept", "flying"),
    [
        ("naive", 96, 0.75, 96, 96, 96, [1] * 4, [1] * 4),
        ("gpipe", 33, 0.2727, 33, 33, 33, [8] * 4, [8] * 4),
        ("1f1b", 33, 0.2727, 33, 33, 33, [4, 3, 2, 1], [4, 3, 2, 1]),
        ("interleaved_1f1b", 28.5, 0.1579, 28.5, 28.5, 28.5, [11, 9, 7, 5], [11, 9, 7, 5]),
        ("zb_h1", 27, 0.1111, 27, 28.2, 28.2, [4] * 4, [4, 3, 2, 1]),
        ("zb_h2", 24, 0, 27, 25.8, 27, [7] * 4, [7, 5, 3, 1]),
        ("zb_v", 24, 0, 25.5, 25.2, 25.8, [8] * 4, None),
        ("v_half", 26.5, 0.0943, None, None, None, [6] * 4, None),
        ("v_min", 29.5, 0.1864, None, None, None, [4] * 4, None),
        ("dualpipe", 26, 0.0769, None, 26.4, None, [5] * 4, None),
        ("dualpipe_v", 27, 0.1111, None, 27.6, None, [9] * 4, None),
        ("chimera", 30, 0.2, None, None, None, [3, 4, 4, 3], [3, 4, 4, 3]),
    ],
)
def test_the_worked_table(name, cost, rate, makespan, uneven, uneven_makespan, kept, flying):
    """Four ranks, eight micro-batches, T = 3; the parts equal, or (1, 1.2, 0.8). None: the table does not say."""
    program = build(name, 4, 8)
    equal, other = simulated(program), simulated(program, **UNEVEN)
    assert equal.bubble_cost == pytest.approx(cost)
    assert round(equal.bubble_rate, 4) == rate
    for found, expected in (
        (equal.makespan, makespan),
        (other.bubble_cost, uneven),
        (other.makespan, uneven_makespan),
        (peak_kept(program), kept),
        (peak_in_flight(program), flying),
    ):
        assert expected is None or found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p", "m", "forward", "half", "weight", "transfer", "zb_h1", "zb_h2"),
    [
        (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.1083),
        (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0837),
        (8, 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0698),
        (8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0294),
        (16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397, 0.0672),
    ],
)
def test_the_published_bubble_rates_of_zero_bubble(p, m, forward, half, weight, transfer, zb_h1, zb_h2):
    """arXiv 2401.10241, tables 5 and 9."""
    settings = {"forward": forward, "input_backward": half, "weight_backward": weight, "transfer": transfer}
    assert round(simulated(build("zb_h1", p, m), **settings).bubble_rate, 4) == zb_h1
    assert round(simulated(build("zb_h2", p, m), **settings).bubble_rate, 4) == zb_h2


@given(rank_counts, st.integers(1, 4), st.integers(1, 4), three)
def test_interleaving_divides_the_bubble(p, rounds, v, parts):
    m = rounds * p
    program = build("interleaved_1f1b", p, m, {"chunks": v})
    assert bubble(program, *parts) == pytest.approx((p - 1) * sum(parts) / v, abs=1e-9)
    assert peak_in_flight(program) == [min(2 * (p - 1 - r) + (v - 1) * p + 1, m * v) for r in range(p)]


@given(rank_counts, st.integers(0, 8), st.integers(1, 4), three)
def test_breadth_first_divides_the_bubble_too(p, more, v, parts):
    m = p + more
    program = build("looped_bfs", p, m, {"chunks": v})
    assert bubble(program, *parts) == pytest.approx((p - 1) * sum(parts) / v, abs=1e-9)
    assert peak_in_flight(program) == [m * v] * p


@given(rank_counts, st.integers(0, 8), three)
def test_zb_h1(p, more, parts):
    m, (weight, forward, half) = p + more, (min(parts), *parts[1:])
    program = build("zb_h1", p, m)
    assert bubble(program, forward, half, weight) == pytest.approx((p - 1) * (forward + half - weight), abs=1e-9)
    assert peak_in_flight(program) == [p - r for r in range(p)]
    assert peak_kept(program) == [p] * p


@given(rank_counts, st.integers(0, 8), three)
def test_zb_h2(p, more, parts):
    m, (weight, forward, half) = 2 * p - 1 + more, (min(parts), *parts[1:])
    program = build("zb_h2", p, m)
    expected = (p - 1) * (forward + half - 2 * weight)
    assert bubble(program, forward, half, weight) == pytest.approx(expected, abs=1e-9)
    assert peak_in_flight(program) == [2 * (p - r) - 1 for r in range(p)]
    assert peak_kept(program) == [2 * p - 1] * p


@given(rank_counts, st.integers(0, 8), three)
def test_zb_v(p, more, parts):
    program = build("zb_v", p, 2 * p - 1 + more)
    weight, forward, half = sorted(parts)
    assert bubble(program, forward, half, weight) == pytest.approx((p - 1) * (half - weight), abs=1e-9)
    assert bubble(program, 1, 1, 1) == pytest.approx(0, abs=1e-9)
    assert peak_kept(program) == [2 * p] * p


@pytest.mark.parametrize("p", [4, 6, 8])
def test_v_half(p):
    assert bubble(build("v_half", p, 3 * p), 1, 1, 1) == pytest.approx((p / 2 - 7 / 6) * 3)


@pytest.mark.parametrize("p", [4, 8])
def test_v_min(p):
    assert bubble(build("v_min", p, 3 * p), 1, 1, 1) == pytest.approx((4 * p - 5) / 2)


@given(st.integers(1, 10), st.integers(1, 20))
def test_the_memory_of_v_half_and_v_min(p, m):
    """Two chunks are one stage unit. Fewer micro-batches keep less, and a V keeps both ends of one at least."""
    assert max(peak_kept(build("v_half", p, m))) <= 2 * ((p + 2) // 2)
    assert max(peak_kept(build("v_min", p, m))) <= 2 * ((p + 4) // 3)
    assert max(peak_kept(build("v_half", p, 2 * p))) == 2 * ((p + 2) // 2)
    assert max(peak_kept(build("v_min", p, 2 * p))) == 2 * ((p + 4) // 3)


@given(st.integers(1, 4), st.integers(0, 5), three)
def test_dualpipe(half_ranks, more, parts):
    p, m = 2 * half_ranks, 4 * half_ranks + 2 * more
    weight, half, forward = sorted(parts)
    program = build("dualpipe", p, m)
    expected = (p / 2 - 1) * (sum(parts) + forward - 2 * weight)
    assert bubble(program, forward, half, weight) == pytest.approx(expected, abs=1e-9)
    weight = min(weight, 1.0)
    published = (p / 2 - 1) * ((2 + weight) + (1 + weight) - 3 * weight)  # F&B + B - 3W
    assert bubble(program, 1, 1, weight) == pytest.approx(published, abs=1e-9)
    assert peak_kept(program) == [p + 1] * p


@given(rank_counts, st.integers(0, 9), three)
def test_dualpipe_v(p, more, parts):
    weight, half, forward = sorted(parts)
    program = build("dualpipe_v", p, 2 * p + more)
    expected = (p - 1) / 2 * (sum(parts) + forward - 2 * weight)
    assert bubble(program, forward, half, weight) == pytest.approx(expected, abs=1e-9)
    assert peak_kept(program) == [2 * p + 1] * p


@given(st.integers(1, 4), st.integers(1, 5))
def test_chimera(half_ranks, units):
    p, m = 2 * half_ranks, 2 * half_ranks * units
    assert simulated(build("chimera", p, m), **HALVES).bubble_rate == pytest.approx((p - 2) / (2 * m + p - 2))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_hanayo(p, rounds, waves):
    m = p * rounds
    program = build("hanayo", p, m, {"waves": waves})
    assert simulated(program, **HALVES).makespan == pytest.approx(4 * (m + (p - 1) / (2 * waves)))
    assert max(peak_in_flight(program)) == 2 * waves * p


@given(st.integers(1, 6), st.integers(1, 12), three)
def test_waiting_for_weights_is_never_worse(p, m, parts):
    """A split backward takes no longer than the whole one in the same place: 1F1B and its zero-bubble sibling."""
    weight, forward, half = min(parts), *parts[1:]
    assert (
        bubble(build("zb_h1", p, m), forward, half, weight) <= bubble(build("1f1b", p, m), forward, half, weight) + 1e-9
    )


@pytest.mark.parametrize(("name", "expected"), [("interleaved_1f1b", 255 * 3 / 2), ("zb_h1", 255), ("zb_v", 0)])
@pytest.mark.slow(most=1)
def test_a_million_actions(name, expected):
    """256 ranks and 1024 micro-batches: what is not linear in the number of actions runs into the test's time limit."""
    program = build(name, 256, 1024)
    verify(program)
    assert bubble(program, 1, 1, 1) == pytest.approx(expected)
    verify(lower(program, reduce=True, step=True))
