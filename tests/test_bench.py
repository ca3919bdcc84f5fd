"""The benchmark's arithmetic: critical paths, excess and share, medians, and what goes into its JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import recorded

import engine
from benchmarks import (
    data_parallel,
    data_parallel_worker,
    layers,
    overlap,
    pipedream,
    scale,
    schedules,
    tracing,
    waterfall,
)  # fmt: skip
from benchmarks.cases import CASES, FIELD, GROUPS, Case
from benchmarks.figures import Run, Step, compare, critical_path, share, step_time, table
from benchmarks.options import parser
from benchmarks.sides import of_calls, of_timeline
from engine.cli.config import CONF, load
from engine.gradients.layout import cut
from engine.plan.schedules import build
from engine.plan.timeline import Timeline
from engine.prepare.prepare import prepare
from engine.training.build import model_layers
from models.sleep import Sleeper

seconds = st.floats(1e-4, 1.0)
EIGHT = build("1f1b", 4, 8)


def equal(stages: int, microbatches: int, forward: float, backward: float) -> dict[str, list[list[float]]]:
    return {"F": [[forward] * microbatches] * stages, "B": [[backward] * microbatches] * stages}


def run(seconds: float, forward: float, backward: float, **details: Any) -> Run:
    """A run of EIGHT whose steps were all the same."""
    return Run(seconds, EIGHT, [Step(seconds, equal(4, 8, forward, backward))] * 3, details)


@given(st.integers(1, 5), st.integers(1, 9), seconds, seconds)
def test_critical_path_of_equal_stages(ranks: int, microbatches: int, forward: float, backward: float) -> None:
    for schedule in ("gpipe", "1f1b"):
        path = critical_path(build(schedule, ranks, microbatches), equal(ranks, microbatches, forward, backward))
        assert path == pytest.approx((microbatches + ranks - 1) * (forward + backward))


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5), st.integers(1, 9))
def test_critical_path_of_gpipe_with_unequal_stages(costs: list[tuple[float, float]], microbatches: int) -> None:
    forward, backward = map(list, zip(*costs, strict=True))
    want = sum(forward) + sum(backward) + (microbatches - 1) * (max(forward) + max(backward))
    durations = {
        op: [[cost] * microbatches for cost in of_stages] for op, of_stages in (("F", forward), ("B", backward))
    }
    path = critical_path(build("gpipe", len(costs), microbatches), durations)
    assert path == pytest.approx(want)


def test_step_time_is_the_median_period_after_the_warmup() -> None:
    assert step_time([0.0, 9.0, 10.0, 12.0, 13.0, 14.0], warmup=1) == 1.0
    assert step_time([0.0, 9.0, 10.0, 12.0, 13.0, 14.0], warmup=0) == 1.0
    assert step_time([5.0, 8.0], warmup=0) == 3.0
    with pytest.raises(ValueError, match="2 step ends leave no period after 1"):
        step_time([5.0, 8.0], warmup=1)


def test_ratio_excess_and_share() -> None:
    ours = [run(0.165 * excess, 0.005, 0.010) for excess in (1.04, 1.05, 1.9)]  # eight micro-batches: 11 x 15 ms
    peer = [run(0.165 * excess, 0.005, 0.010) for excess in (1.2, 1.1, 1.0)]
    row = compare(ours, peer, {"1 thread": [3.0, 1.0, 2.0]})
    assert row["ratio"] == pytest.approx(1.05 / 1.1)
    assert row["ours"]["critical_path_s"] == pytest.approx(0.165)
    assert row["ours"]["excess"] == pytest.approx(0.05)
    assert row["peer"]["excess"] == pytest.approx(0.1)
    assert row["share"] == pytest.approx(0.5)
    assert row["ours"]["per_action_s"] == pytest.approx(0.165 * 1.05 / 16)
    assert row["plain"]["1 thread"]["median_s"] == 2.0


def test_excess_is_over_each_runs_own_durations() -> None:
    """A side whose sleeps overshoot more is not charged for it, nor is a step in which one of them does."""
    ours = [run(0.33, 0.010, 0.020)]
    peer = [run(0.33, 0.005, 0.010)]
    row = compare(ours, peer, {})
    assert row["ours"]["excess"] == pytest.approx(0.0)
    assert row["peer"]["excess"] == pytest.approx(1.0)


def test_share_of_a_peer_without_excess_is_not_a_number() -> None:
    assert share(0.1, 0.0) is None
    assert share(0.1, -0.01) is None
    assert share(0.1, 0.2) == pytest.approx(0.5)


def test_result_is_json_and_a_table() -> None:
    runs = [run(0.2, 0.005, 0.010, loss=1.0)]
    rows = {
        "sleep": compare(runs, runs, {}),
        "gpt": compare(runs, runs, {"1 thread": [0.5], "all threads": [0.25]}),
    }
    assert json.loads(json.dumps(rows)) == rows
    head, sleep, gpt = table(rows).splitlines()
    assert head.split()[:3] == ["row", "ours", "ms"]
    assert sleep.split()[:4] == ["sleep", "200.00", "200.00", "1.000"]
    assert gpt.split()[-2:] == ["500.00", "250.00"]
    assert len(head) == len(sleep) == len(gpt)


def test_excess_is_over_each_steps_own_durations() -> None:
    late = equal(4, 8, 0.005, 0.010)
    late["F"] = [*late["F"][:3], [0.005 + 0.1 * (m == 2) for m in range(8)]]  # one sleep of the last stage took longer
    found = compare([Run(0.165, EIGHT, [Step(0.165, equal(4, 8, 0.005, 0.010)), Step(0.265, late)])], [], {})
    assert found["ours"]["excess"] == pytest.approx(0.0)


def test_durations_of_a_measured_step() -> None:
    rows = [(0, 1, 0), (0, 0, 0), (1, 1, 0), (1, 0, 1)]  # kind, stage, micro-batch: F1 of rank 1, F0, B1, B0
    kind, stage, microbatch = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    rank = np.array([1, 0, 1, 0], dtype=np.int32)
    start = np.array([10, 0, 30, 50]) * 1_000_000
    windows = np.array([[-1, 99], [5, 70]]) * 1_000_000
    timeline = Timeline(rank, kind, stage, microbatch, start, start + np.array([1, 2, 3, 4]) * 1_000_000, windows)
    step = of_timeline(timeline, build("gpipe", 2, 2))
    assert step.seconds == pytest.approx(0.1)  # of the first rank
    assert step.durations["F"] == [[pytest.approx(0.002), 0.0], [pytest.approx(0.001), 0.0]]
    assert step.durations["B"] == [[0.0, pytest.approx(0.004)], [pytest.approx(0.003), 0.0]]


def test_calls_are_counted_off_in_the_order_of_the_row() -> None:
    program = build("zb_v", 2, 4)
    times: dict[tuple[str, ...], list[float]] = {
        (op, str(stage)): [100.0 * step + i for step in range(3) for i in range(4)]
        for op in "FIW"
        for stage in range(4)
    }
    del times["I", "0"]  # done as a part of W
    found = of_calls(times, program, 2, 3)
    assert found["I"][0] == [0.0] * 4
    for op, stage in (("F", 0), ("F", 3), ("I", 2), ("W", 1)):
        order = [a.microbatch for r in range(2) for a in program.actions(r) if (a.op.name, a.stage) == (op, stage)]
        assert [found[op][stage][m] for m in order] == [200.0, 201.0, 202.0, 203.0]
    with pytest.raises(RuntimeError, match="stage 1 did 11 W in 3 steps"):
        of_calls(times | {("W", "1"): [1.0] * 11}, program, 0, 3)


def test_critical_path_of_halves_and_chunks() -> None:
    """Where F, I and W take equally long, ZB-V has no bubble: its makespan of 25.5 has askew ends, which the steps
    before and after fill."""
    program = build("zb_v", 4, 8)
    assert critical_path(program, {op: [[0.5] * 8] * 8 for op in "FIW"}) == pytest.approx(24.0)


def test_a_row_without_a_peer() -> None:
    row = compare([run(0.2, 0.005, 0.010)], [], {})
    assert (row["peer"], row["ratio"], row["share"]) == (None, None, None)
    assert table({"naive": row}).splitlines()[1].split()[1:4] == ["200.00", "-", "-"]


def test_what_zero_bubbles_gain_is_said_for_each_size() -> None:
    def row(step: float, share: float | None) -> dict[str, object]:
        return {"ours": {"median_s": step, "critical_path_s": step}, "share": share}

    rows = {"1f1b m=8": row(0.165, 0.5), "zb_v m=8": row(0.132, 0.9), "zb_h1 m=8": row(0.140, None)}
    first, second = schedules.conclusions(rows)
    assert first.startswith("zb_v m=8 takes 132.0 ms, 1f1b m=8 165.0 ms: 1.250 times as fast")
    assert second == "more than 0.7 of the peer's excess: zb_v m=8 0.90"
    assert schedules.conclusions({"1f1b m=16": row(0.3, 0.5)}) == [
        "at most 0.7 of the peer's excess everywhere (largest: 0.50)"
    ]


def test_sleep_made_for_the_peer_is_the_same_layer() -> None:
    """The same values and gradients; the weight's share of the time is spent on the way to the weight."""
    sleeper = Sleeper(4, 0.0, 0.0, 0.0)
    (other,) = layers.halved(torch.nn.Sequential(sleeper))
    x = torch.randn(3, 4, requires_grad=True)
    y, z = sleeper(x), other(x)
    assert torch.equal(y, z)
    assert torch.equal(*(torch.autograd.grad(v.square().sum(), sleeper.linear.weight)[0] for v in (y, z)))


def test_scale_measures_each_step() -> None:
    found = scale.measured("v_min", 4, 16)
    assert found["actions"] == 4 * 16 * 6
    assert found["total_s"] >= found["generate_s"] > 0 and found["peak_bytes"] > 1e7


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cases_leave_steps_to_measure(case: Case) -> None:
    assert case.steps >= case.warmup + 6
    assert f"pipeline.microbatches={case.microbatches}" in case.overrides()
    assert "schedule=csv" in case.overrides("x.csv") and "schedule.path=x.csv" in case.overrides("x.csv")


def test_names_of_cases_tell_them_apart() -> None:
    assert len(CASES) == sum(map(len, (*GROUPS.values(), *FIELD.values())))


def test_a_bar_is_judged_by_what_is_exposed() -> None:
    slow, usual = waterfall.CASES["stage"], dict.fromkeys(("step", *waterfall.BARS), 100.0)
    assert waterfall.makespan([1] * 4) == 11 * 30 and slow.amount == pytest.approx((6 + 7 * 3 - 11 * 1.5) * 30)
    assert slow.exposed == waterfall.makespan([1, 3, 1, 1]) - waterfall.makespan([1] * 4)
    grown = {name: 100.0 + slow.others.get(name, 0) for name in usual} | {"step": 100 + slow.exposed}
    found, said = grown | {"imbalance": 100 + 0.95 * slow.amount}, "stage 1 takes 3.0 times as long"
    assert waterfall.judged(slow, usual, found, said)["verdict"] == "right"
    assert waterfall.judged(slow, usual, found, "stage 2 takes")["verdict"] == "not named"
    wrong = waterfall.judged(slow, usual, grown | {"imbalance": 100 + 0.8 * slow.amount, "data": 150.0}, said)
    assert wrong["verdict"] == "imbalance, data"
    told = waterfall.row("stage", slow, wrong)
    assert told[1:5] == ["480.0", "0.0", "480.0", "480.0"] and told[8] == "data +50.0"


@pytest.mark.parametrize("name", waterfall.CASES)
def test_nothing_exposed_is_more_than_was_injected(name: str) -> None:
    assert 0 < waterfall.CASES[name].exposed <= waterfall.CASES[name].injected


def test_bars_of_a_run_are_read_step_by_step(tmp_path: Path) -> None:
    record, _ = recorded.recorder(recorded.job("gpipe", 2, 4), tmp_path)
    recorded.traced_run(record, 4)
    summary = record.finish("completed")
    steps = waterfall.steps_of(tmp_path)
    assert len(steps) == 4
    means = [sum(column) / 3 for column in zip(*steps[1:], strict=True)]  # a run leaves out its first
    assert means == pytest.approx([1e3 * summary["waterfall"][bar] for bar in waterfall.BARS])
    longer = [[2 * bar for bar in steps[0]], *steps[1:], [3 * bar for bar in steps[0]]]
    assert waterfall.usual_step([{"steps": longer}]) == waterfall.usual_step([{"steps": steps + steps[-1:]}])


def test_recording_an_action_is_measured_with_and_without() -> None:
    assert tracing.per_action_ns(True) > 0 and tracing.per_action_ns(False) > 0


def test_what_tracing_costs_is_judged_pair_by_pair() -> None:
    """The machine got slower from pair to pair; what counts is the difference within each."""
    slower = tracing.compared([(0.101, 0.1), (0.201, 0.2), (0.301, 0.3)], actions=8)
    assert slower["share"] == pytest.approx(0.005) and slower["per_action_s"] == pytest.approx(0.001 / 8)
    assert slower["error"] == pytest.approx(0.0, abs=1e-9)  # all three say the same
    assert tracing.row("gpt", slower)[-1] == "right" and tracing.row("tiny", slower)[-1] == "too much"
    assert tracing.row("gpt", slower | {"share": 0.011})[-1] == "too much"
    assert tracing.row("tiny", slower | {"per_action_s": 19e-6})[-1] == "right"
    apart = tracing.compared([(0.11, 0.1), (0.09, 0.1)] * 8, actions=8)  # a standard deviation of a tenth, nearly
    assert apart["share"] == pytest.approx(0.0, abs=1e-9) and apart["error"] == pytest.approx(0.2 / 15**0.5)


def test_blocks_of_traced_steps_are_compared_with_the_blocks_after_them() -> None:
    seconds = [9.0, 3.0, 5.0, 8.0, 1.0, 3.0, 7.0, 4.0, 4.0, 7.0, 2.0, 2.0, 99.0]
    assert tracing.blocks(seconds, 3) == [(4.0, 2.0), (4.0, 2.0)]  # without the first step of each, and what is left


@pytest.mark.process
@pytest.mark.slow
def test_a_run_alternates_between_traced_blocks_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PAIRS", 1)
    seconds = tracing.seconds_of_steps(tracing.TINY, 2)
    assert len(seconds) == 8 and all(0 < each < 60 for each in seconds)


def test_ways_of_data_parallelism_are_compared_with_none_and_with_ddp() -> None:
    rows = {"gpt": {"none": [0.2, 0.1, 0.3], "ddp": [0.25], "ring": [0.24, 0.26]}}
    lines = [line.split() for line in data_parallel.table(rows).splitlines()]
    assert lines[1:] == [
        ["gpt", "none", "200.0", "1.000", "0.800"],
        ["gpt", "ddp", "250.0", "1.250", "1.000"],
        ["gpt", "ring", "250.0", "1.250", "1.000"],
    ]
    choices = {path.stem for path in (CONF / "allreduce").glob("*.yaml")}
    assert set(data_parallel.ALGORITHMS) <= choices
    assert {"data_parallel.replicas=3", "transport=auto"} <= set(data_parallel.case_of("gpt", 3, "tree").choices)
    assert {"allreduce=ring", "transport=gloo"} <= set(data_parallel.case_of("gpt", 2, "ring by gloo").choices)


@pytest.mark.slow
def test_a_plain_loop_of_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(data_parallel.MODELS, "gpt", ("model=mlp", "data=digits", "train.global_batch_size=8"))
    for way in ("none", "distributed_optimizer"):
        ends = data_parallel_worker.train("gpt", way, 0, 1)
        assert len(ends) == data_parallel.STEPS and ends == sorted(ends)
    engine.shutdown()


def test_a_steady_state_is_judged_by_what_nothing_explains() -> None:
    def summary(measured: float, predicted: float) -> dict[str, Any]:
        told = {"predicted_with_transfer": 0.02, "predicted_with_variation": predicted}
        kept = {"weight_versions": [2, 1], "staleness": [1, 0], "step_time": {"median": 0.05}}
        return {"bubble": {"measured": measured, "predicted": 0.01}, "asynchronous": told, **kept}

    good, bad = (
        pipedream.figures([summary(0.5, 0.5), summary(0.05 + x, 0.04), summary(0.1, 0.1 - x)]) for x in (0, 0.02)
    )
    assert good["beyond"] == pytest.approx(0)
    assert bad["beyond"] == pytest.approx(0.02)
    assert bad["beyond_ms"] == pytest.approx(1.0)
    assert pipedream.verdict({"a": good}).endswith("none")
    assert "b 0.020" in pipedream.verdict({"a": good, "b": bad | {"beyond": 0.0201}})


def test_what_is_hidden_is_judged_by_what_could_be() -> None:
    def told(hidden: float, share: float | None) -> dict[str, Any]:
        rank = {"total": 0.05, "hideable": 0.02, "hidden": hidden, "share": share}
        return {"share": share, "slices": 32, "per_rank": [rank, rank | {"share": None}]}

    good, bad = (overlap.figures([told(0.02 * share, share) for share in (0.5, share, 1.0)]) for share in (0.9, 0.89))
    assert good["hidden"] == pytest.approx(0.018) and good["share"] == good["least"] == 0.9
    assert overlap.verdict({"a": good}).endswith("none") and "b 89.0 %" in overlap.verdict({"a": good, "b": bad})


def test_a_slow_reduction_is_what_is_asked_for() -> None:
    """Four buckets a rank, of one layer each, and slow links between the two copies of each stage alone."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        wanted = load(compose("config", overrides=overlap.choices("interleaved_1f1b", 3)))
    job = prepare(wanted, ".", ".")
    assert len(job.layers) == 16 and job.replicas == 2 and job.settings.train.steps == 3
    assert sorted((a, b) for a, b, _ in wanted.delay.links) == sorted(
        pair for r in range(4) for pair in ((r, r + 4), (r + 4, r))
    )
    made, ends = model_layers(job.settings.model), [*job.split[1:], len(job.layers)]
    for stage in job.placement.stages_of(0):
        layers = [(name, build()) for name, build in made[job.split[stage] : ends[stage]]]
        named = [(f"{name}.{key}", p) for name, layer in layers for key, p in layer.named_parameters()]
        buckets = cut(named[::-1], wanted.allreduce.bucket_bytes)
        assert len(buckets) == len(layers) == 2


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5"])
def test_repeats_that_measure_nothing_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser("tracing", "What it is.\n\nMore.").parse_args([f"--repeats={given}"])
    assert ended.value.code == 2 and f"{given}: a whole number, at least 1" in capsys.readouterr().err
    assert parser("tracing", None).parse_args(["--repeats", "7"]).repeats == 7
