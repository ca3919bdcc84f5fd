"""The account is exact and follows its definition; the three bubbles are the published ones; the sentence is right."""

from __future__ import annotations

import numpy as np
import pytest
import recorded
from hypothesis import given
from hypothesis import strategies as st
from recorded import MS, costs, measured, with_train

from engine.account.bubble import account, stretches
from engine.account.cause import causes, diagnose
from engine.account.measure import Bubbles, Measure, fractions, repeated
from engine.categories import NAMES
from engine.plan.actions import Op, unpack
from engine.plan.schedules import build
from engine.plan.timeline import COMPUTE_KINDS, Kind, Span, Timeline
from engine.plan.verify import verify
from engine.settings import AllReduceSettings, Train

RANKS = 3


def by_name(row: np.ndarray) -> dict[str, int]:
    """The parts of one rank that are not 0."""
    return {name: value for name, value in zip(NAMES, row.tolist(), strict=True) if value}


def timeline(spans: list[tuple[int, Kind, int, int, int, int]], *windows: tuple[int, int]) -> Timeline:
    return Timeline.of([Span(*span) for span in spans], windows, measured=True)


# ---- the account ---------------------------------------------------------------------------------------------------


@st.composite
def garbage(draw: st.DrawFn) -> Timeline:
    """Spans that no worker would send: overlapping, reversed, outside their window, of stages that do not exist."""
    moment = st.integers(-5, 45)
    span = st.builds(
        Span,
        st.integers(0, RANKS - 1),
        st.sampled_from(list(Kind)),
        st.integers(-1, RANKS),
        st.integers(-1, 2),
        moment,
        moment,
    )
    windows = [(begin, begin + draw(st.integers(0, 40))) for begin in draw(st.lists(moment, min_size=3, max_size=3))]
    return Timeline.of(draw(st.lists(span, max_size=25)), windows, measured=True)


def moment_by_moment(what: Timeline, ranks: int) -> np.ndarray:
    """The account by its definition, one nanosecond after another."""
    spans = list(what)
    table = np.zeros((what.ranks, len(NAMES)), dtype=np.int64)
    for rank, (begin, finish) in enumerate(what.windows.tolist()):
        mine = [(i, clipped(s, begin, finish)) for i, s in enumerate(spans) if s.rank == rank]
        own = [(i, awaited(s, mine, spans, ranks)) for i, s in mine]
        own = [(i, s) for i, s in own if s.start < s.end]
        # An asynchronous update lists computations from before its window, too.
        busy = [s for s in spans if s.rank == rank and s.kind in COMPUTE_KINDS and s.start < s.end]
        first = min((int(s.start) for s in busy), default=begin)
        last = max((int(s.end) for s in busy), default=begin) - 1
        for t in range(begin, finish):
            now = [(i, s) for i, s in own if s.start <= t < s.end]
            table[rank, NAMES.index(name_of(t, now, spans, ranks, first, last))] += 1
    return table


def clipped(s: Span, begin: int, finish: int) -> Span:
    start = min(max(s.start, begin), finish)
    return s._replace(start=start, end=max(start, min(max(s.end, begin), finish)))


def awaited(s: Span, mine: list[tuple[int, Span]], spans: list[Span], ranks: int) -> Span:
    """Loading within a wait for a message is awaited only once that message was issued."""
    if s.kind != Kind.WAIT_DATA:
        return s
    waits = [(i, w) for i, w in mine if w.kind in (Kind.WAIT_F, Kind.WAIT_B) and w.start <= s.start and s.end <= w.end]
    return s._replace(start=max([s.start, *(min(issued(i, w, spans, ranks), s.end) for i, w in waits)]))


def name_of(t: int, now: list[tuple[int, Span]], spans: list[Span], ranks: int, first: int, last: int) -> str:
    kinds = {s.kind for _, s in now}
    waits = [(i, s) for i, s in now if s.kind in (Kind.WAIT_F, Kind.WAIT_B)]
    if kinds & set(COMPUTE_KINDS):
        return "compute"
    for kind, name in ((Kind.STEP, "optimizer"), (Kind.WAIT_DATA, "data")):
        if kind in kinds:
            return name
    if kinds & {Kind.WAIT_REDUCE, Kind.WAIT_GATHER, Kind.WAIT_COUNT}:
        return "reduce"
    if waits and t < first:
        return "fill"
    if t > last or Kind.WAIT_NORM in kinds:
        return "drain"
    if not waits:
        return "other"
    return "transfer" if all(issued(i, s, spans, ranks) <= t for i, s in waits) else "stall"


def issued(index: int, wait: Span, spans: list[Span], ranks: int) -> float:
    """When the message of the k-th wait was sent: at the start of the k-th send of its producer."""
    forward = wait.kind == Kind.WAIT_F
    kind, stage = (Kind.SEND_F, wait.stage - 1) if forward else (Kind.SEND_B, wait.stage + 1)

    def same(s: Span, kind: Kind, stage: int) -> bool:
        return (s.rank // ranks, s.kind, s.stage, s.microbatch) == (wait.rank // ranks, kind, stage, wait.microbatch)

    earlier = sum(same(s, Kind(wait.kind), wait.stage) for s in spans[:index])
    sends = [s.start for s in spans if same(s, kind, stage)]
    return sends[earlier] if earlier < len(sends) else float("inf")


@given(garbage(), st.sampled_from([1, RANKS]))
def test_every_nanosecond_has_one_name(what: Timeline, ranks: int) -> None:
    found = account(what, ranks, RANKS)
    assert found.table.dtype == np.int64
    assert (found.table >= 0).all() and (found.latency >= found.messages).all()
    assert found.table.sum(axis=1).tolist() == (what.windows[:, 1] - what.windows[:, 0]).tolist()
    assert found.table.tolist() == moment_by_moment(what, ranks).tolist()


@given(garbage(), st.sampled_from([1, RANKS]))
def test_stretches_tile_the_windows_and_add_up_to_the_account(what: Timeline, ranks: int) -> None:
    cut = stretches(what, ranks)
    table = np.zeros((what.ranks, len(NAMES)), dtype=np.int64)
    np.add.at(table, (cut.rank, cut.name), cut.end - cut.start)
    assert (table == account(what, ranks, RANKS).table).all()
    for rank, (begin, finish) in enumerate(what.windows.tolist()):
        mine = cut.rank == rank
        edges = [begin, *cut.end[mine].tolist()]
        assert cut.start[mine].tolist() == edges[:-1] and edges[-1] == finish
        names = cut.name[mine]
        assert (names[1:] != names[:-1]).all()  # each is as long as it can be


def test_the_sum_is_exact_at_the_size_of_real_clocks() -> None:
    start = 2**61 + 1
    what = timeline([(0, Kind.F, 0, 0, start + 1, start + 10**15)], (start, start + 10**15 + 7))
    assert by_name(account(what, 1, 1).table[0]) == {"compute": 10**15 - 1, "drain": 7, "other": 1}


def test_a_step_by_hand() -> None:
    spans = [
        (0, Kind.WAIT_DATA, -1, -1, 0, 5),
        (0, Kind.F, 0, 0, 6, 16),
        (0, Kind.SEND_F, 0, 0, 16, 17),
        (0, Kind.WAIT_B, 0, 0, 17, 44),
        (0, Kind.B, 0, 0, 44, 54),
        (0, Kind.REDUCE, 0, -1, 54, 60),
        (0, Kind.WAIT_REDUCE, 0, -1, 55, 60),
        (0, Kind.WAIT_NORM, -1, -1, 60, 62),
        (0, Kind.STEP, 0, -1, 62, 70),
        (1, Kind.WAIT_F, 1, 0, 0, 18),
        (1, Kind.F, 1, 0, 18, 28),
        (1, Kind.WAIT_COUNT, -1, -1, 29, 31),
        (1, Kind.B, 1, 0, 31, 41),
        (1, Kind.SEND_B, 1, 0, 41, 42),
        (1, Kind.STEP, 1, -1, 60, 70),
    ]
    found = account(timeline(spans, (0, 70), (0, 70)), 2, 2)
    assert by_name(found.table[0]) == {
        "data": 5, "compute": 20, "stall": 41 - 17, "transfer": 44 - 41, "drain": 1 + 2, "reduce": 5, "optimizer": 8,
        "other": 1 + 1,
    }  # fmt: skip
    assert by_name(found.table[1]) == {
        "fill": 18, "compute": 20, "reduce": 2, "other": 1, "drain": 19, "optimizer": 10,
    }  # fmt: skip
    assert (found.latency.tolist(), found.messages.tolist()) == ([2 + 3, 0], [2, 0])


def test_loading_behind_a_wait_is_no_wait_for_data() -> None:
    """Loaded from 12 to 40 while the gradient is awaited, which was issued at 30: only 30 to 40 was for the data."""
    spans = [
        (0, Kind.F, 0, 0, 0, 10),
        (0, Kind.WAIT_B, 0, 0, 10, 41),
        (0, Kind.WAIT_DATA, -1, -1, 12, 40),
        (0, Kind.B, 0, 0, 41, 50),
        (1, Kind.F, 1, 0, 0, 10),
        (1, Kind.SEND_B, 1, 0, 30, 31),
    ]
    found = account(timeline(spans, (0, 50), (0, 50)), 2, 2)
    assert by_name(found.table[0]) == {"compute": 19, "stall": 20, "data": 10, "transfer": 1}
    assert found.messages.tolist() == [0, 0]


def test_a_reduction_behind_a_computation_costs_nothing() -> None:
    spans = [(0, Kind.B, 0, 0, 0, 10), (0, Kind.REDUCE, 0, -1, 0, 10)]
    assert by_name(account(timeline(spans, (0, 10)), 1, 1).table[0]) == {"compute": 10}


def test_repeated_microbatches_meet_in_order() -> None:
    """Two passes: the second wait for micro-batch 0 is met by the second send of it."""
    spans = [
        (0, Kind.F, 0, 0, 0, 10),
        (0, Kind.SEND_F, 0, 0, 10, 10),
        (0, Kind.SEND_F, 0, 0, 30, 30),
        (1, Kind.F, 1, 0, 0, 5),
        (1, Kind.WAIT_F, 1, 0, 5, 12),
        (1, Kind.WAIT_F, 1, 0, 20, 32),
        (1, Kind.F, 1, 0, 32, 40),
    ]
    row = by_name(account(timeline(spans, (0, 40), (0, 40)), 2, 2).table[1])
    assert (row["stall"], row["transfer"]) == (5 + 10, 2 + 2)


def test_replicas_do_not_answer_each_other() -> None:
    spans = [
        (0, Kind.SEND_F, 0, 0, 3, 3),
        (2, Kind.SEND_F, 0, 0, 8, 8),
        (3, Kind.F, 1, 1, 0, 1),
        (3, Kind.WAIT_F, 1, 0, 1, 10),
        (3, Kind.F, 1, 0, 10, 12),
    ]
    row = by_name(account(timeline(spans, *[(0, 12)] * 4), 2, 2).table[3])
    assert (row["stall"], row["transfer"]) == (7, 2)


def test_a_rank_without_anything_to_compute_drains() -> None:
    spans = [(0, Kind.WAIT_REDUCE, 0, -1, 4, 9)]
    assert by_name(account(timeline(spans, (0, 10)), 1, 1).table[0]) == {"reduce": 5, "drain": 5}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 2), (1, 3)])
def test_published_bubbles(ranks: int, microbatches: int) -> None:
    for name in ("naive", "gpipe", "1f1b"):
        program = build(name, ranks, microbatches)
        found = account(measured(program, costs(program)), ranks, ranks)
        ideal = 1 - 1 / ranks if name == "naive" else (ranks - 1) / (microbatches + ranks - 1)
        assert 1 - fractions(found.table)[:, 0].mean() == pytest.approx(ideal, abs=1e-12)
        assert not found.table[:, NAMES.index("transfer")].any() and not found.table[:, NAMES.index("other")].any()


def test_transfer_is_what_a_message_takes() -> None:
    """One micro-batch: the gradient's way back is waited for in full, the activation's is part of the fill."""
    program = build("gpipe", 2, 1)
    found = account(measured(program, costs(program), transfer=MS // 2), 2, 2)
    assert by_name(found.table[0]) == {"compute": 6 * MS, "stall": 6 * MS + MS // 2, "transfer": MS // 2}
    assert by_name(found.table[1]) == {"fill": 2 * MS + MS // 2, "compute": 6 * MS, "drain": 4 * MS + MS // 2}
    assert (found.latency.tolist(), found.messages.tolist()) == ([MS, 0], [2, 0])


# ---- the three bubbles ---------------------------------------------------------------------------------------------


def result(of: recorded.Job, *steps: Timeline) -> Bubbles:
    measure = Measure(of)
    for step in steps:
        measure.add(step)
    found = measure.result()
    assert found is not None
    return found


def test_equal_stages_have_one_bubble() -> None:
    of = recorded.job("1f1b", 4, 8)
    found = result(of, measured(of.compute, costs(of.compute)))
    assert (found.ideal, found.predicted, found.measured) == pytest.approx((3 / 11,) * 3)


def test_imbalance_shows_in_the_prediction_and_transfer_in_the_measurement() -> None:
    """gpipe, unequal stages: makespan = sum f + (m-1) max f + the same for b, exactly."""
    of = recorded.job("gpipe", 2, 4)
    found = result(of, measured(of.compute, costs(of.compute, slow=1), transfer=MS))
    assert found.ideal == pytest.approx(1 / 5)
    assert found.predicted == pytest.approx(1 - 4 * (6 + 18) / (2 * (24 + 3 * 18)))
    assert found.predicted_step == pytest.approx((24 + 3 * 18) * 1e-3)
    assert found.predicted is not None and found.measured > found.predicted


def test_the_first_step_counts_only_when_it_is_alone() -> None:
    of = recorded.job("gpipe", 2, 4)
    slow, fast = (measured(of.compute, costs(of.compute) * factor) for factor in (10, 1))
    assert result(of, slow).seconds[0, 0] == pytest.approx(0.24)
    found = result(of, slow, fast, fast)
    assert (found.steps, found.seconds[0, 0]) == (2, pytest.approx(0.024))


def test_a_short_step_is_in_the_account_but_not_in_the_costs() -> None:
    of = recorded.job("gpipe", 2, 4)
    short = build("gpipe", 2, 2)
    whole = measured(of.compute, costs(of.compute))
    found = result(of, whole, whole, measured(short, costs(short) * 5))
    assert found.costs is not None and found.costs[0].tolist() == [[pytest.approx(2e-3)] * 4] * 2
    assert found.ideal == pytest.approx(1 / 5)
    assert found.measured == pytest.approx((1 / 5 + 1 / 3) / 2)
    assert result(of, measured(short, costs(short))).ideal is None


def test_costs_are_means_over_steps_and_replicas() -> None:
    of = recorded.job("gpipe", 2, 4, replicas=2)
    one, two = (measured(of.compute, costs(of.compute) * factor, replicas=2) for factor in (1, 2))
    found = result(of, one, one, two)
    assert found.costs is not None
    assert found.costs[:2].mean(axis=(1, 2)).tolist() == pytest.approx([3e-3, 6e-3])
    assert found.per_rank.shape == (4,)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_passes_of_an_accumulation_are_predicted_together(schedule: str) -> None:
    """These schedules end a pass where the next one begins, on rank 0: three take three times as long."""
    of = with_train(recorded.job(schedule, 3, 4), accumulate=3)
    whole = repeated(of.compute, 3)
    verify(whole)
    assert [len(row) for row in whole.rows] == [24] * 3
    spans = list(measured(whole, costs(whole)))
    spans = [s._replace(microbatch=s.microbatch % 4) for s in spans]  # as workers name them
    end = max(int(s.end) for s in spans)
    found = result(of, Timeline.of(spans, [[0, end]] * 3, measured=True))
    one = result(recorded.job(schedule, 3, 4), measured(of.compute, costs(of.compute)))
    assert found.predicted == pytest.approx(found.measured)
    assert one.predicted_step is not None
    assert found.predicted_step == pytest.approx(3 * one.predicted_step)


def test_nothing_traced_has_no_bubbles() -> None:
    assert Measure(recorded.job()).result() is None


# ---- the sentence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 2), (3, 1)])
def test_a_stage_three_times_as_slow_is_named(schedule: str, ranks: int, microbatches: int) -> None:
    of = recorded.job(schedule, ranks, microbatches)
    for slow in range(ranks):
        sentence = diagnose(of, result(of, measured(of.compute, costs(of.compute, slow=slow))))
        assert f"stage {slow} takes 3.0 times" in sentence
        assert sentence.count("stage ") == 1 and sentence.endswith(".") and "\n" not in sentence


def test_imbalance_is_the_cause_where_it_costs_most() -> None:
    of = recorded.job("gpipe", 2, 4)
    found = result(of, measured(of.compute, costs(of.compute, slow=1)))
    assert causes(found)["imbalance"] == pytest.approx((24 + 3 * 18 - 5 * 12) * 1e-3)
    assert diagnose(of, found).startswith("The stages are unequal")


def test_the_schedules_own_bubble_comes_with_figures() -> None:
    of = recorded.job("gpipe", 2, 4)
    sentence = diagnose(of, result(of, measured(of.compute, costs(of.compute))))
    assert "with pipeline.microbatches=8 the ideal bubble falls from 20.0 % to 11.1 %" in sentence
    of = with_train(of, global_batch_size=4)
    sentence = diagnose(of, result(of, measured(of.compute, costs(of.compute))))
    assert "train.global_batch_size=8" in sentence
    of = recorded.job("naive", 2, 4)
    sentence = diagnose(of, result(of, measured(of.compute, costs(of.compute))))
    assert "with schedule=1f1b the ideal bubble falls from 50.0 % to 20.0 %" in sentence


def with_span(of: recorded.Job, kind: Kind, lasts: int) -> Bubbles:
    """A step with something long in front of it (a reduction: behind it), on every rank. One rank: no own bubble."""
    behind = kind is Kind.WAIT_REDUCE
    base = measured(of.compute, costs(of.compute), start=0 if behind else lasts)
    end = int(base.windows.max()) + (lasts if behind else 0)
    kinds, start = ((kind, Kind.REDUCE), end - lasts) if behind else ((kind,), 0)
    long = [Span(rank, each, 0, -1, start, start + lasts) for rank in range(of.world) for each in kinds]
    return result(of, Timeline.of([*base, *long], [[0, end]] * of.world, measured=True))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Kind.WAIT_DATA,
            "Waiting for data costs 50.0 % of the step, most on rank 0 (24.0 ms); load ahead with data.workers=2",
        ),
        (Kind.WAIT_REDUCE, "Waiting for other replicas (allreduce=ring)"),
        (Kind.STEP, "The optimizer costs 50.0 %"),
        (Kind.SEND_F, "The interpreter between actions costs 50.0 %"),
    ],
)
def test_other_causes_are_named(kind: Kind, words: str) -> None:
    of = recorded.job("gpipe", 1, 4)
    assert of.settings.allreduce == AllReduceSettings()
    assert words in diagnose(of, with_span(of, kind, 24 * MS))


def test_a_slow_edge_is_named() -> None:
    of = recorded.job("naive", 4, 4, train=Train(global_batch_size=64))
    steps = measured(of.compute, costs(of.compute, forward=MS // 100, backward=MS // 100), transfer=5 * MS)
    found = result(of, steps)
    assert found.latency.tolist() == pytest.approx([5e-3] * 3 + [0])
    assert causes(found)["transfer"] == pytest.approx(4 * 6 * 5e-3)
    assert causes(found)["variation"] == pytest.approx(0, abs=1e-9)
    sentence = diagnose(of, found)
    assert "Messages under way cost 99.7 %" in sentence and "between stages 0 and 1 (5.0 ms each)" in sentence


def test_a_run_without_losses_has_nothing_to_say() -> None:
    of = recorded.job("gpipe", 1, 4)
    assert diagnose(of, result(of, measured(of.compute, costs(of.compute)))).startswith("Nothing stands out")


def test_programs_hold_no_other_operations_than_were_asked_for() -> None:
    ops = unpack(np.concatenate(repeated(build("1f1b", 2, 3), 2).rows)).op
    assert set(ops.tolist()) == {Op.F, Op.B}
