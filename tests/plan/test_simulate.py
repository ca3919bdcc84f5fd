"""Simulated figures are the published ones."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import PLAIN, executed, scheduled

from engine.plan.actions import Op, Placement, Program
from engine.plan.lowering import lower
from engine.plan.schedules import build
from engine.plan.simulate import Costs, Figures, figures, simulate

NAN = float("nan")


def simulated(name: str, ranks: int, microbatches: int, **costs) -> Figures:
    program = build(name, ranks, microbatches)
    return figures(program, simulate(program, Costs.from_settings(costs, program.placement, microbatches)))


@pytest.mark.parametrize(
    ("name", "cost", "rate", "peaks"),
    [("naive", 96, 0.75, [1] * 4), ("gpipe", 33, 0.2727, [8] * 4), ("1f1b", 33, 0.2727, [4, 3, 2, 1])],
)
def test_the_worked_table(name, cost, rate, peaks):
    """Four ranks, eight micro-batches, T = 3, whether the halves of a backward are equal or not."""
    for costs in ({}, {"forward": 1, "input_backward": 1.2, "weight_backward": 0.8}):
        result = simulated(name, 4, 8, **costs)
        assert result.bubble_cost == pytest.approx(cost)
        assert result.makespan == pytest.approx(cost)
        assert round(result.bubble_rate, 4) == round(result.bubble_fraction, 4) == rate
        assert [r.peak_in_flight for r in result.per_rank] == peaks
        assert [r.busy for r in result.per_rank] == pytest.approx([24] * 4)


@pytest.mark.parametrize(
    ("p", "m", "forward", "half", "weight", "transfer", "published"),
    [
        (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431),
        (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985),
        (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347),
        (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091),
        (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552),
    ],
)
def test_the_published_bubble_rates_of_1f1b(p, m, forward, half, weight, transfer, published):
    """arXiv 2401.10241, tables 5 and 9."""
    result = simulated("1f1b", p, m, forward=forward, input_backward=half, weight_backward=weight, transfer=transfer)
    assert round(result.bubble_rate, 4) == published


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(st.integers(1, 8), st.integers(1, 12), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_bubble_of_equal_stages(name, p, m, forward, backward):
    """(P-1)/(M+P-1), also with fewer micro-batches than ranks."""
    result = simulated(name, p, m, forward=forward, input_backward=backward / 2, weight_backward=backward / 2)
    assert result.makespan == pytest.approx((m + p - 1) * (forward + backward))
    assert result.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@given(st.integers(1, 8), st.integers(1, 12))
def test_the_bubble_of_naive_does_not_depend_on_microbatches(p, m):
    assert simulated("naive", p, m).bubble_fraction == pytest.approx(1 - 1 / p)


durations = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@given(durations, st.integers(1, 10), st.data())
def test_the_makespan_of_gpipe_with_unequal_stages(forward, m, data):
    p = len(forward)
    backward = data.draw(st.lists(st.floats(0.1, 10), min_size=p, max_size=p))
    halves = {"input_backward": [b / 4 for b in backward], "weight_backward": [3 * b / 4 for b in backward]}
    makespan = simulated("gpipe", p, m, forward=forward, **halves).makespan
    expected = sum(forward) + (m - 1) * max(forward) + sum(backward) + (m - 1) * max(backward)
    assert makespan == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(1, 8), st.floats(0, 3))
def test_only_the_receiver_pays_for_a_transfer(p, m, transfer):
    """Naive crosses every edge twice per micro-batch, but the backward's arrival at rank 0 ends a micro-batch."""
    makespan = simulated("naive", p, m, transfer=transfer).makespan
    assert makespan == pytest.approx(m * (3 * p + 2 * (p - 1) * transfer))


def test_an_edge_has_its_own_transfer_both_ways():
    result = simulated("naive", 3, 1, transfer=[10, 100, 9999])
    assert result.makespan == 9 + 2 * 110


@given(st.one_of(scheduled(), executed()), st.integers(0, 2**32))
def test_every_action_starts_as_early_as_what_it_waits_for_allows(program, seed):
    """Against what the spans themselves say, on any placement; an overlapped pair lets go of its results at its end."""
    rng = np.random.default_rng(seed)
    duration = rng.uniform(0.5, 2, size=(4, program.stages, program.microbatches))
    transfer = rng.uniform(0, 2, size=program.stages)
    timeline = simulate(program, Costs(duration, transfer))
    ends = {(s.stage, int(s.kind), s.microbatch): s.end for s in timeline}
    rows = [list(program.actions(r)) for r in range(program.ranks)]
    pairs = {a[:3]: ends[b[:3]] for row in rows for a, b in itertools.pairwise(row) if a.fused}
    place, split = program.placement.rank, (Op.B, Op.I)
    clock = dict.fromkeys(range(program.ranks), 0.0)
    for span in timeline:
        arrivals = [clock[span.rank]]
        step = {Op.F: -1, Op.B: 1, Op.I: 1}.get(Op(span.kind), 0)
        for op in (Op.F,) if step < 0 else split if step else ():
            if (source := (span.stage + step, int(op), span.microbatch)) in ends:
                edge = transfer[min(span.stage, source[0])]
                far = place(span.stage, span.microbatch) != place(source[0], span.microbatch)
                left = pairs.get(source, ends[source]) if far else ends[source]
                arrivals.append(left + edge * far)
        assert span.start == pytest.approx(max(arrivals))
        assert span.end - span.start == pytest.approx(duration[span.kind, span.stage, span.microbatch])
        clock[span.rank] = span.end
    assert len(timeline) == len(program)


@given(st.one_of(scheduled(), executed()), st.booleans())
def test_a_lowered_program_takes_as_long_as_its_computations(program, step):
    costs = Costs.from_settings({"transfer": 0.25}, program.placement, program.microbatches)
    plain, lowered = simulate(program, costs), simulate(lower(program, reduce=True, step=step), costs)
    assert list(plain) == list(lowered)


@given(executed())
def test_figures_add_up(program):
    costs = Costs.from_settings({"transfer": 0.5}, program.placement, program.microbatches)
    timeline = simulate(program, costs)
    result = figures(program, timeline)
    for rank in result.per_rank:
        assert rank.busy + rank.idle == pytest.approx(result.makespan)
        assert rank.busy <= rank.cost + 1e-9 <= result.makespan + 2e-9
    idle = sum(rank.idle for rank in result.per_rank)
    assert result.bubble_fraction == pytest.approx(idle / (program.ranks * result.makespan), abs=1e-12)
    assert timeline.windows.tolist() == [[0.0, result.makespan]] * program.ranks


def test_a_program_that_costs_nothing_has_no_bubble():
    free = {"forward": 0, "input_backward": 0, "weight_backward": 0}
    result = simulated("gpipe", 2, 2, **free)
    assert (result.bubble_fraction, result.bubble_rate, result.makespan) == (0, 0, 0)


def test_a_chunk_costs_its_share_and_a_full_backward_both_halves():
    placement = Placement(2, ((0, 1, 0, 1),))
    settings = {"forward": 4, "input_backward": [2, 4, 6, 8], "weight_backward": 1, "transfer": [1, 2, 3, 4]}
    costs = Costs.from_settings(settings, placement, 3)
    assert costs.duration.shape == (4, 4, 3)
    assert costs.duration[Op.F, :, 0].tolist() == [2, 2, 2, 2]
    assert costs.duration[Op.I, :, 1].tolist() == [1, 2, 3, 4]
    assert costs.duration[Op.W, :, 2].tolist() == [0.5] * 4
    assert costs.duration[Op.B, :, 2].tolist() == [1.5, 2.5, 3.5, 4.5]
    assert costs.transfer.tolist() == [1, 2, 3, 4]


def test_a_list_per_rank_is_one_per_stage_of_the_unchunked_pipeline():
    """Stages 2k and 2k+1 are the halves of slice k, wherever they lie; messages are not cut in halves."""
    placement = Placement(2, ((0, 1, 1, 0),))
    settings = {"forward": [4, 8], "input_backward": [2, 6], "weight_backward": 1, "transfer": [1, 3]}
    costs = Costs.from_settings(settings, placement, 1)
    assert costs.duration[Op.F, :, 0].tolist() == [2, 2, 4, 4]
    assert costs.duration[Op.B, :, 0].tolist() == [1.5, 1.5, 3.5, 3.5]
    assert costs.transfer.tolist() == [1, 1, 3, 3]


def test_costs_may_differ_between_microbatches():
    program = build("gpipe", 1, 2)
    duration = np.ones((4, 1, 2))
    duration[Op.F, 0, 1] = 5
    assert simulate(program, Costs(duration, np.zeros(1))).end.tolist() == [1, 6, 7, 8]


@pytest.mark.parametrize(
    ("costs", "complaint"),
    [
        ({"forwards": 1}, r"'forwards'; its keys: forward, input_backward"),
        ({"forward": [1, 2]}, r"forward lists 2 numbers for 3 stages"),
        ({"transfer": -1}, r"transfer=-1: -1 is not a number"),
        ({"forward": [1, "a", 2]}, r"'a' is not a number"),
        ({"forward": "12"}, r"'12' is not a number"),
        ({"weight_backward": True}, r"True is not a number"),
        ({"weight_backward": NAN}, r"nan is not a number"),
        ({"input_backward": math.inf}, r"inf is not a number"),
        ({"forward": None}, r"None is not a number"),
    ],
)
def test_wrong_costs_are_refused(costs, complaint):
    with pytest.raises(ValueError, match=complaint):
        Costs.from_settings(costs, Placement.linear(3), 2)


def test_a_program_that_cannot_end_is_not_simulated():
    gpipe = build("gpipe", 2, 2)
    early = Program("early", gpipe.placement, 2, (gpipe.rows[0], gpipe.rows[1][::-1].copy()))
    crossed = Program("crossed", gpipe.placement, 2, (gpipe.rows[0][[0, 2, 1, 3]], gpipe.rows[1][[1, 0, 2, 3]]))
    costs = Costs.from_settings({}, gpipe.placement, 2)
    for program in (early, crossed):
        with pytest.raises(ValueError, match=rf"{program.name} cannot run"):
            simulate(program, costs)


@pytest.mark.parametrize("name", PLAIN)
def test_one_rank_has_no_bubble(name):
    assert simulated(name, 1, 5).bubble_fraction == pytest.approx(0)
