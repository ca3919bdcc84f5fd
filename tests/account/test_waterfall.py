"""The waterfall: bars add up whatever the step was, and what is made slow on purpose shows in its own bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual import MS, Virtual, last_step

from engine.account.cause import diagnose, sentence
from engine.account.measure import Measure, repeated
from engine.account.replay.waterfall import BARS, MOST_COMPUTATIONS, Waterfall, Waterfalls, missing
from engine.plan.actions import Op, Program
from engine.plan.schedules import build
from engine.plan.simulate import Costs, figures, simulate
from engine.plan.timeline import Kind, Timeline

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "chimera")
FORWARD, BACKWARD = 2 * MS, 4 * MS


def of(timeline: Timeline, program: Program, replicas: int = 1) -> Waterfall:
    found = Waterfalls(program, replicas).of(timeline)
    assert found is not None
    return found


def bars(program: Program, replicas: int = 1, **parts: Any) -> dict[str, int]:
    return dict(zip(BARS, of(last_step(program, replicas, **parts), program, replicas).bars, strict=True))


# ---- exact -------------------------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> tuple[Program, int, Timeline]:
    """A random schedule at random costs, everything switched on."""
    name, replicas = draw(st.sampled_from(SCHEDULES)), draw(st.integers(1, 2))
    program = build(name, 2, draw(st.sampled_from((2, 4))))
    seed = draw(st.integers(0, 2**32 - 1))
    drawn = np.random.default_rng(seed)
    return (
        program,
        replicas,
        Virtual(
            program,
            replicas,
            steps=2,
            action=lambda *_: int(drawn.integers(0, 9 * MS)),
            link=lambda *_: int(drawn.integers(1, MS)),
            reduce=lambda _: int(drawn.integers(1, 9 * MS)),
            load=int(drawn.integers(0, 3 * MS)),
            update=int(drawn.integers(0, MS)),
            count=int(drawn.integers(0, MS)),
            norm=int(drawn.integers(1, MS)) if seed % 2 else None,
            gather=(lambda _: int(drawn.integers(1, 9 * MS))) if replicas > 1 and seed % 3 else None,
            between=int(drawn.integers(0, MS // 10)),
        ).timelines()[-1],
    )


@given(steps())
@pytest.mark.slow
def test_bars_add_up_to_the_measured_time_exactly(step: tuple[Program, int, Timeline]) -> None:
    program, replicas, timeline = step
    found = of(timeline, program, replicas)
    assert all(type(bar) is int for bar in found.bars)
    assert sum(found.bars) == found.total == int(timeline.windows[:, 1].max() - timeline.windows[:, 0].max())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.slow(keep=7)
def test_without_an_interpreter_nothing_is_left(name: str, replicas: int) -> None:
    """What was switched on is all there was: the replay comes to the measured time by itself."""
    program = build(name, 4, 8)
    gather = (lambda stage: MS) if replicas > 1 else None
    found = bars(program, replicas, norm=MS // 4, count=MS // 8, gather=gather)
    assert abs(found["rest"]) <= 0.005 * sum(found.values())
    with_interpreter = bars(program, replicas, norm=MS // 4, count=MS // 8, gather=gather, between=MS // 20)
    assert with_interpreter["rest"] > 0


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_work_and_schedule_are_the_published_bubble(name: str) -> None:
    ranks, microbatches = 4, 8
    found = bars(build(name, ranks, microbatches), link=lambda *_: 0, load=0, update=0)
    slots = ranks * microbatches if name == "naive" else microbatches + ranks - 1
    assert found["work"] == microbatches * (FORWARD + BACKWARD)
    assert found["work"] + found["schedule"] == slots * (FORWARD + BACKWARD)
    assert all(found[name] == 0 for name in BARS[2:])


# ---- one thing at a time -----------------------------------------------------------------------------------------

GPIPE = build("gpipe", 4, 8)


def unequal(costs: list[float]) -> float:
    """GPipe's makespan in ns for stages of so many times the usual cost: closed form."""
    return sum((sum(costs) + 7 * max(costs)) * each for each in (FORWARD, BACKWARD))


def costs(
    stage: int = -1, times: float = 1, microbatch: int = -1, more: int = 0, replica: int = -1, slower: float = 1
) -> Any:
    def action(rank: int, op: Op, at: int, mb: int, step: int) -> int:
        usual = FORWARD if op is Op.F else BACKWARD
        late = more if op is Op.F and at == 2 and mb == microbatch else 0
        return int(usual * (times if at == stage else 1) * (slower if rank // 4 == replica else 1)) + late

    return action


INJECTED: dict[str, tuple[dict[str, Any], str, float, dict[str, float]]] = {
    # what is made slow, the bar that grows, by how much, and what else follows from it
    "a stage three times as slow": (
        {"action": costs(stage=1, times=3)},
        "imbalance",
        unequal([1, 3, 1, 1]) - unequal([1.5] * 4),
        {"work": 8 * 0.5 * (FORWARD + BACKWARD), "schedule": 3 * 0.5 * (FORWARD + BACKWARD)},
    ),
    "one late micro-batch": ({"action": costs(microbatch=3, more=20 * MS)}, "variation", 20 * MS, {}),
    "a slow link": (  # the first activation and the last gradient pass it with nothing to hide behind
        {"link": lambda a, b: 10 * MS if {a % 4, b % 4} == {1, 2} else MS // 5},
        "transfer",
        2 * (10 * MS - MS / 5),
        {},
    ),
    "a slow loader": ({"load": 60 * MS}, "data", 60 * MS - 22 * MS, {}),
    "a slow reduction": ({"reduce": lambda stage: 30 * MS if stage == 0 else MS}, "reduce", 29 * MS, {}),
    "a slow gathering": ({"gather": lambda stage: 30 * MS if stage == 0 else 0}, "reduce", 30 * MS, {}),
    "a slow replica": (
        {"action": costs(replica=1, slower=1.5)},
        "reduce",
        0.5 * unequal([1] * 4),
        {},
    ),
}


@pytest.mark.parametrize("what", INJECTED)
def test_what_is_made_slow_shows_in_its_own_bar(what: str) -> None:
    slow, bar, amount, others = INJECTED[what]
    usual = bars(GPIPE, replicas=2)
    found = bars(GPIPE, replicas=2, **slow)
    grown = {name: found[name] - usual[name] for name in BARS}
    for name in BARS:
        expected = amount if name == bar else others.get(name, 0.0)
        assert abs(grown[name] - expected) <= 0.1 * amount, (name, grown)


# Where links, loads, updates and reductions take no time there is nothing to hide behind but the bubble.
FREE: dict[str, Any] = {"link": lambda *_: 0, "load": 0, "update": 0, "reduce": lambda _: 0}
BUBBLE = 3 * (FORWARD + BACKWARD)  # in which the first and the last rank wait for their first message
EXACT: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[int], dict[str, int]]]] = {
    # what takes so many nanoseconds longer, and by how many the bars grow
    "a stage": (
        lambda ns: {"action": lambda rank, op, at, *_: costs()(rank, op, at, -1, 0) + 4 * ns * (at == 1)},
        lambda ns: {"work": 16 * ns, "schedule": 6 * ns, "imbalance": 8 * 8 * ns - 22 * ns},
    ),
    "a micro-batch": (lambda ns: {"action": costs(microbatch=3, more=ns)}, lambda ns: {"variation": ns}),
    "a link": (lambda ns: {"link": lambda a, b: ns * ({a % 4, b % 4} == {1, 2})}, lambda ns: {"transfer": 2 * ns}),
    "the loader": (lambda ns: {"load": ns}, lambda ns: {"data": max(0, ns - BUBBLE)}),
    "a reduction": (lambda ns: {"reduce": lambda stage: ns * (stage == 0)}, lambda ns: {"reduce": ns}),
    "a gathering": (lambda ns: {"gather": lambda stage: ns * (stage == 0)}, lambda ns: {"reduce": ns}),
    "a gathering that the warm-up hides": (
        lambda ns: {"gather": lambda stage: ns * (stage == 3)},
        lambda ns: {"reduce": max(0, ns - 3 * FORWARD - 3 * BACKWARD)},
    ),
    "a replica": (
        lambda ns: {"action": lambda rank, op, *_: (FORWARD if op is Op.F else BACKWARD) + ns * (rank >= 4)},
        lambda ns: {"reduce": 2 * 11 * ns},
    ),
}


@pytest.mark.parametrize("what", EXACT)
@settings(max_examples=8)
@given(ns=st.integers(1, 40 * MS))
@pytest.mark.slow
def test_what_is_exposed_shows_to_the_nanosecond_and_what_is_hidden_does_not(what: str, ns: int) -> None:
    slow, exposed = EXACT[what]
    usual, found = (bars(GPIPE, 2, steps=3, **FREE | more) for more in ({}, slow(ns)))
    assert {bar: found[bar] - usual[bar] for bar in BARS} == dict.fromkeys(BARS, 0) | exposed(ns)


def test_what_replicas_wait_for_each_other_is_told_apart_from_their_reduction() -> None:
    slow = of(last_step(GPIPE, 2, action=costs(replica=1, slower=1.5)), GPIPE, 2)
    assert slow.waiting == pytest.approx(0.5 * unequal([1] * 4), rel=0.01)
    assert slow.alone[1] == pytest.approx(slow.alone[0] + slow.waiting, rel=0.01)
    reduction = of(last_step(GPIPE, 2, reduce=lambda stage: 30 * MS), GPIPE, 2)
    assert abs(reduction.waiting) < MS and reduction["reduce"] > 25 * MS


def test_a_reduction_behind_the_computation_costs_nothing() -> None:
    """Stage 3 is complete long before stage 0: what is reduced meanwhile is hidden."""
    hidden = bars(GPIPE, 2, reduce=lambda stage: 10 * MS if stage == 3 else 0)
    assert hidden["reduce"] == 0


def test_of_several_buckets_only_what_the_last_backward_leaves_over_counts() -> None:
    """The first bucket of stage 0 is reduced while its last backward still runs."""
    timeline = last_step(GPIPE, 2, reduce=lambda stage: 10 * MS if stage == 0 else 0)
    spans = []
    for span in timeline:
        if span.kind == Kind.REDUCE and span.stage == 0:
            spans += [span._replace(start=span.start - 3 * MS, end=span.start - MS), span]
        else:
            spans.append(span)
    several = of(Timeline.of(spans, timeline.windows.tolist(), measured=True), GPIPE, 2)
    assert several == of(timeline, GPIPE, 2) and several["reduce"] == 10 * MS


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a stage three times as slow", "stage 1 takes 3.0 times"),
        ("a slow replica", "replica 1 is slower than the others"),
        ("a slow link", "the slowest those between stages 1 and 2"),
        ("a slow reduction", "Waiting for other replicas (allreduce=ring)"),
        ("one late micro-batch", "2F3, by 20.0 ms on average"),
        ("a slow loader", "Waiting for data"),
    ],
)
def test_the_report_names_what_was_made_slow(what: str, said: str) -> None:
    job = recorded.job("gpipe", 4, 8, 2)
    measure = Measure(job)
    measure.add(last_step(job.compute, 2, **INJECTED[what][0]))
    bubbles = measure.result()
    assert bubbles is not None
    assert said in sentence(INJECTED[what][1], job, bubbles, "so much")


def test_a_slow_replica_is_named_even_where_something_else_costs_more() -> None:
    job = recorded.job("gpipe", 4, 8, 2)
    for slower, named in ((1.15, True), (1.001, False)):
        measure = Measure(job)
        measure.add(last_step(job.compute, 2, action=costs(replica=1, slower=slower)))
        said = diagnose(job, measure.result())
        assert said.startswith("The schedule's own bubble") and ("; besides, replica 1 is slower" in said) is named


# ---- what has none -----------------------------------------------------------------------------------------------


def test_a_step_of_another_program_has_no_waterfall() -> None:
    short = last_step(build("gpipe", 4, 3))
    assert Waterfalls(GPIPE, 1).of(short) is None
    timeline = last_step(GPIPE)
    spans = [span for span in timeline if (span.kind, span.stage, span.microbatch) != (Kind.B, 2, 5)]
    assert Waterfalls(GPIPE, 1).of(Timeline.of(spans, timeline.windows.tolist(), measured=True)) is None
    other = last_step(build("1f1b", 4, 8))
    assert Waterfalls(GPIPE, 1).of(other) is None


def test_programs_too_large_to_replay_have_none() -> None:
    program = build("naive", 1, MOST_COMPUTATIONS // 2 + 1)
    assert Waterfalls(program, 1).of(Timeline.of([], [[0, 1]], measured=True)) is None
    assert "20,002 computations, more than the 20,000" in missing(recorded.job("naive", 1, MOST_COMPUTATIONS // 2 + 1))
    assert "updates of pipedream overlap" in missing(replace(recorded.job("pipedream", 2, 4), windows=(5,)))


def test_passes_of_an_accumulated_step_count_their_microbatches_anew() -> None:
    program = repeated(build("gpipe", 2, 2), 3)
    timeline = last_step(program, load=0, update=0, link=lambda *_: 0)
    anew = [span._replace(microbatch=span.microbatch % 2 if span.microbatch >= 0 else -1) for span in timeline]
    found = Waterfalls(program, 1, passes=3).of(Timeline.of(anew, timeline.windows.tolist(), measured=True))
    makespan = figures(program, simulate(program, Costs(np.array([2.0, 4, 0, 0])[:, None, None], np.zeros(2)))).makespan
    assert found is not None and found["work"] + found["schedule"] == makespan * MS == found.total
