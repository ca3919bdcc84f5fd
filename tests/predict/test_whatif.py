"""Predictions from a run's own costs: the run itself, closed forms, what can only help, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import recorded
from finished import MS, job_of, measured
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan.choose import synchronous
from engine.plan.schedules import SCHEDULES
from engine.predict.cuts import cut_of
from engine.predict.measured import Measured
from engine.predict.scenarios import LeftOut, answer, asked, usual
from engine.predict.whatif import DOUBLED, FREE, MEASURED, Predictor, Scenario


@cache
def ran(
    schedule: str = "1f1b", ranks: int = 3, microbatches: int = 6, transfer: int = 0, slow: int | None = None,
    layers: int = 4, per_row: int | None = None, replicas: int = 1,
) -> Measured:  # fmt: skip
    """A recorded run: 2 ms forward and 4 ms backward per stage, or `per_row` ns and twice that for each sample, and
    1 ms of optimizer."""
    of = job_of(schedule, ranks, microbatches, replicas, layers)
    rows = 64 // (replicas * microbatches)
    forward = 2 * MS if per_row is None else per_row * rows
    with TemporaryDirectory() as folder:
        durations = recorded.costs(of.compute, forward, 2 * forward, slow)
        durations[2] = durations[3] = durations[1] / 2
        return measured(Path(folder) / "run", of, durations=durations, transfer=transfer)


SYNCHRONOUS = [name for name in synchronous() if not SCHEDULES[name].complaint(4, 8, {})]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "naive", "interleaved_1f1b", "chimera"])
@pytest.mark.slow(keep=3)
def test_the_run_itself_is_given_back(schedule: str) -> None:
    base = ran(schedule, 2, 4, transfer=MS // 4)
    predictor = Predictor(base)
    found = predictor.predict(predictor.own)
    assert found.step == pytest.approx(base.step_time, rel=1e-3)
    assert found.step == predictor.predict(Scenario("again", schedule, {}, 4)).step
    assert all("two copies" in note for note in found.notes)


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.slow(keep=2, most=8)
def test_another_schedule_takes_what_a_run_of_it_takes(name: str) -> None:
    """Equal stages, so that cutting a stage in v parts is the same as a run with v times as many."""
    base, other = ran("1f1b", 4, 8), ran(name, 4, 8)
    chunks = len(other.split) // 4
    predicted = Predictor(base).predict(Scenario(name, name, {}, 8)).step
    of = recorded.job(name, 4, 8)
    each = recorded.costs(of.compute, 2 * MS // chunks, 4 * MS // chunks)
    each[2] = each[3] = each[1] / 2
    alone = max(span.end for span in recorded.spans_of(of.compute, each)) * 1e-9
    expected = alone + 1e-3 * len(of.placement.homes) / len(other.split)  # of two copies each is updated
    # Steps follow one another without a barrier: one takes no more than alone, and no less than its busiest rank.
    assert 8 * 6e-3 <= predicted <= expected * (1 + 1e-3)


def test_gpipe_is_its_closed_form() -> None:
    found = Predictor(ran("1f1b", 3, 6)).predict(Scenario("gpipe", "gpipe", {}, 6))
    assert found.step == pytest.approx((6 + 2) * 6e-3 + 1e-3, rel=1e-3)


@settings(max_examples=12, deadline=None)
@given(
    transfer=st.sampled_from([0, MS // 10, MS, 5 * MS]),
    slow=st.sampled_from([None, 0, 2]),
    name=st.sampled_from(["1f1b", "gpipe", "zb_h1", "zb_v"]),
)
@pytest.mark.slow
def test_faster_transfers_never_cost_and_recomputing_never_keeps_more(
    transfer: int, slow: int | None, name: str
) -> None:
    predictor = Predictor(ran(transfer=transfer, slow=slow))
    as_run = Scenario(name, name, {}, 6)
    steps = [predictor.predict(replace(as_run, transfer=each)).step for each in (MEASURED, DOUBLED, FREE)]
    assert steps[0] >= steps[1] >= steps[2]
    assert steps[0] > steps[2] or not transfer or slow is not None
    kept, again = predictor.predict(as_run), predictor.predict(replace(as_run, recompute=True))
    assert all(a <= b for a, b in zip(again.activations, kept.activations, strict=True))
    assert again.step > kept.step


def test_messages_much_larger_than_any_measured_are_said_to_be_a_guess() -> None:
    base = ran(ranks=2, transfer=MS, layers=4)
    raw = {**base.raw, "layers": [dict(layer) for layer in base.raw["layers"]]}
    known, large = base.split[1] - 1, base.split[1]
    raw["layers"][large]["sends"] = [40 * each for each in raw["layers"][known]["sends"]]
    predictor = Predictor(replace(base, raw=raw))
    moved = replace(predictor.own, split=(0, large + 1))
    assert predictor.hop is None
    (said,) = [note for note in predictor.predict(moved).notes if "at worst" in note]
    assert "up to 40 times as large" in said
    assert predictor.predict(moved).step > 40e-3  # a message of 40 ms at least
    for usual_one in (predictor.own, replace(moved, transfer=FREE), replace(moved, split=None)):
        assert not any("at worst" in note for note in predictor.predict(usual_one).notes)


def test_recomputing_adds_a_forward_to_each_backward() -> None:
    predictor = Predictor(ran("gpipe", 3, 6))
    again = predictor.predict(replace(predictor.own, recompute=True))
    assert again.step == pytest.approx((6 + 2) * 8e-3 + 1e-3, rel=1e-3)


# ---- micro-batches -------------------------------------------------------------------------------------------------


def test_one_size_of_micro_batches_gives_bounds_and_no_prediction() -> None:
    predictor = Predictor(ran("gpipe", 2, 4))
    found = answer(predictor, usual(predictor))
    assert not [each for each in found.found if "micro-batches" in each.scenario.words]
    why = {left.words: left.why for left in found.left_out}
    # 8 stages' worth and one more: half as long each, or as long as now.
    assert "between 28.0 ms" in why["8 micro-batches"] and "and 55.0 ms" in why["8 micro-batches"]


@pytest.mark.parametrize("per_row", [None, 100_000])
@pytest.mark.slow(keep=1)
def test_two_sizes_tell_fixed_costs_from_those_of_a_sample(per_row: int | None) -> None:
    base, other = ran("gpipe", 2, 4, per_row=per_row), ran("gpipe", 2, 8, per_row=per_row)
    predictor = Predictor(base, [other])
    assert predictor.sizes == [8.0, 16.0]
    expected = ran("gpipe", 2, 16, per_row=per_row).step_time
    found = predictor.predict(Scenario("16", "gpipe", {}, 16))
    assert found.step == pytest.approx(expected, rel=2e-3)
    assert any("extrapolated" in note for note in found.notes)
    assert predictor.predict(Scenario("8", "gpipe", {}, 8)).notes == ()


def test_memory_goes_with_the_samples_in_flight() -> None:
    predictor = Predictor(ran("gpipe", 2, 4), [ran("gpipe", 2, 8)])
    found = {m: predictor.predict(Scenario("", "gpipe", {}, m)) for m in (4, 8)}
    assert found[4].activations == found[8].activations == (4 * 4000, 4 * 4000)  # 4 layers, 1000 bytes each
    flat = {m: predictor.predict(Scenario("", "1f1b", {}, m)).activations for m in (4, 8)}
    assert flat[4] == (8000, 4000) and flat[8] == (4000, 2000)


def test_weights_are_held_where_their_layers_are() -> None:
    predictor = Predictor(ran("1f1b", 4, 8))
    own, both = (predictor.predict(Scenario(name, name, {}, 8)) for name in ("1f1b", "dualpipe"))
    lasting = [np.subtract(each.memory, each.activations) for each in (own, both)]
    gradients = 500 * (1 + 2 + 3 + 4) / 4  # of a rank, on average
    assert np.allclose(lasting[0], 3500 / 500 * gradients)
    # Two copies of every stage, and buckets as large as the gradients, which this run did not need.
    assert np.allclose(lasting[1], 2 * (lasting[0] + gradients))
    assert any("two copies" in note for note in both.notes)


def with_reduction(base: Measured, **seconds: list[float]) -> Measured:
    """The run as one in which reductions took their time, and had buckets."""
    raw = {**base.raw, "reduced": True, "gathered": "gather" in seconds, **seconds}
    return replace(base, raw=raw, buckets=np.full(len(base.names), 1e6))


def test_without_copies_and_replicas_nothing_is_reduced() -> None:
    base = ran("chimera", 2, 4)
    reduced = Predictor(with_reduction(base, reduce=[0.02, 0.02]))
    for predictor in (Predictor(base), reduced):
        found = predictor.predict(Scenario("gpipe", "gpipe", {}, 4))
        assert found.step == pytest.approx((4 + 1) * 6e-3 + 0.5e-3, rel=1e-3)  # each rank updates half as much
        assert max(found.memory) < 1e6 and found.notes == ()
    own, dual = (reduced.predict(Scenario(name, name, {}, 4)) for name in ("chimera", "dualpipe"))
    assert min(own.step, dual.step) > 0.02 + 4 * 6e-3
    assert min(own.memory) > 4 * 1e6  # two stages of two layers on each rank
    assert own.notes == () and not any("without" in note for note in dual.notes)


def test_copies_of_replicas_are_more_to_reduce_among() -> None:
    predictor = Predictor(with_reduction(ran("1f1b", 2, 4, replicas=2), reduce=[0.01, 0.01]))
    assert predictor.predict(Scenario("", "gpipe", {}, 4)).notes == ()
    notes = predictor.predict(Scenario("", "chimera", {}, 4)).notes
    assert notes == ("reductions among 4 ranks as long as they were among 2",)


def test_parameters_are_gathered_before_the_next_step_uses_them() -> None:
    base = ran("gpipe", 2, 4, replicas=2)
    plain = Predictor(with_reduction(base, reduce=[0.0, 0.0]))
    divided = Predictor(with_reduction(base, reduce=[0.0, 0.0], gather=[0.03, 0.03]))
    steps = [each.predict(Scenario("", "1f1b", {}, 4)).step for each in (plain, divided)]
    assert steps[1] == pytest.approx(steps[0] + 0.03, rel=1e-3)


# ---- splits --------------------------------------------------------------------------------------------------------


def test_another_split_moves_layers_with_their_costs() -> None:
    base = ran("gpipe", 2, 4, slow=0)  # layers of 1.5 and of 0.5 ms forward
    predictor = Predictor(base)
    (scenario,) = asked(predictor, [], [], [["block3"]])
    assert not isinstance(scenario, LeftOut)
    assert scenario.overrides == ("partition=manual", "partition.split=[block3]")
    found = predictor.predict(scenario)
    stages = [3 * 4.5, 4.5 + 4 * 1.5]
    update = 2e-3 * 3 / 8  # the run's two milliseconds, by parameters: rank 0, the last to end, has 3 layers of 8
    assert found.step == pytest.approx((sum(stages) + 3 * max(stages)) * 1e-3 + update, rel=1e-3)
    assert cut_of(base, 2).split == (0, 4) and found.split == (0, 3)


def test_more_stages_are_cut_as_even_as_layers_allow_and_named_for_the_command_line() -> None:
    predictor = Predictor(ran("1f1b", 2, 4, layers=3))
    found = {each.scenario.words: each for each in answer(predictor, usual(predictor)).found}
    assert found["zb_v"].split == (0, 2, 3, 5) or len(found["zb_v"].split or ()) == 4
    assert found["zb_v"].scenario.overrides[0] == "schedule=zb_v"
    assert found["zb_v"].scenario.overrides[2].count(",") == 2


def test_too_few_layers_leave_schedules_out_with_the_reason() -> None:
    predictor = Predictor(ran("1f1b", 2, 4, layers=1))
    why = {left.words: left.why for left in answer(predictor, usual(predictor)).left_out}
    assert why["zb_v"] == "it has 4 stages, and the model only 2 layers"
    assert "asynchronous" in why["pipedream"]
    assert why["another split"].startswith("the model has 2 layers")


def test_a_model_made_to_measure_is_cut_in_parts() -> None:
    base = ran("1f1b", 2, 4, layers=1)
    model = {**base.config["model"], "stages": 2, "chunks": 1}
    made = replace(base, config={**base.config, "model": model})
    found = Predictor(made).predict(Scenario("zb_v", "zb_v", {}, 4))
    assert found.split is None and "each layer is cut in equal parts" in found.notes
    listed = replace(base, config={**base.config, "model": model | {"forward_ms": [1, 2]}})
    assert not listed.made_to_measure


# ---- halves of backwards -------------------------------------------------------------------------------------------


def test_halves_are_equal_until_a_run_has_measured_them() -> None:
    base = ran("1f1b", 2, 4)
    alone = Predictor(base)
    assert any("equal halves" in note for note in alone.predict(Scenario("", "zb_h1", {}, 4)).notes)
    for microbatches in (4, 8):
        halved = ran("zb_h1", 2, microbatches)
        layers = halved.layers.copy()
        layers[:, 0], layers[:, 2], layers[:, 3] = 2e-4, 3e-4, 1e-4
        known = Predictor(base, [replace(halved, layers=layers, measured=np.array([True, False, True, True]))])
        found, whole = known.layers(halved=True), known.layers(halved=False)
        if microbatches == 4:  # micro-batches of the same size: as it was there
            assert (found == layers).all()
        else:
            assert found[0, 2] == pytest.approx(0.75 * base.layers[0, 1])
            assert (found[0, :2] == base.layers[0, :2]).all()
        assert (whole == base.layers).all()
        assert not [note for note in known.predict(Scenario("", "zb_h1", {}, 4)).notes if "equal halves" in note]


def test_replicas_wait_for_the_slow_one() -> None:
    base = ran("gpipe", 2, 4, replicas=2)
    layers = base.layers.copy()
    layers[1] *= 2
    slow = replace(base, layers=layers, raw={**base.raw, "reduced": True})
    fast = Predictor(base).predict(Scenario("", "1f1b", {}, 4)).step
    assert Predictor(slow).predict(Scenario("", "1f1b", {}, 4)).step == pytest.approx(2 * fast - 1e-3, rel=1e-2)


# ---- what is asked -------------------------------------------------------------------------------------------------


def test_what_is_named_is_combined() -> None:
    predictor = Predictor(ran("1f1b", 2, 4), [ran("1f1b", 2, 8)])
    found = asked(predictor, ["gpipe", "1f1b"], [4, 8], [["block3"], ["block5"]])
    assert len(found) == 8
    assert found[0].words == "gpipe, 4 micro-batches, split block3"


@pytest.mark.parametrize(
    ("schedules", "microbatches", "splits", "said"),
    [
        (["gpip"], [], [], "no synchronous schedule 'gpip'"),
        (["pipedream"], [], [], "no synchronous schedule"),
        ([], [65], [], "a replica has 64 samples"),
        ([], [0], [], "0 micro-batches"),
        ([], [], [["block99"]], "no layer 'block99'"),
    ],
)
def test_what_there_is_not_is_refused(
    schedules: list[str], microbatches: list[int], splits: list[list[str]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        asked(Predictor(ran("1f1b", 2, 4)), schedules, microbatches, splits)


def test_answers_come_best_first() -> None:
    predictor = Predictor(ran("gpipe", 2, 4, transfer=MS))
    found = answer(predictor, usual(predictor))
    steps = [each.step for each in found.found]
    assert steps == sorted(steps) and len(steps) > 8
    assert found.baseline.scenario.words == "this run"
