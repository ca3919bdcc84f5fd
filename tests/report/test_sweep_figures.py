"""What a sweep's jobs say together: the laws of scaling, the Pareto front, what was swept, the ways to train."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.schedules import build
from engine.plan.simulate import Costs, figures, simulate
from engine.report.sweep.laws import amdahl, fit_amdahl, fit_gustafson, gustafson
from engine.report.sweep.pareto import front, fronts
from engine.report.sweep.results import UNKNOWN, UNSET, ordered, sweep_of
from engine.report.sweep.scaling import curves, scaling_rows
from engine.report.sweep.ways import HEAD, way_rows

SIZES = st.lists(st.integers(1, 64), min_size=2, max_size=8, unique=True)
SERIAL = st.floats(0, 1)


def row(job: int, *overrides: str, step: float = 0.1, total: int = 1000, **more: Any) -> dict[str, Any]:
    """A completed job of 1F1B with two ranks, four micro-batches, one replica and a batch of 32, unless given."""
    told = {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "replicas": 1, "global_batch_size": 32} | more
    figures = {"step_time": {"median": step}, "samples_per_second": told["global_batch_size"] / step if step else 0}
    memory = {name: [0, 0] for name in ("parameters", "gradients", "buckets", "optimizer_state")}
    memory |= {"activations": [total // 2, total], "total": [total // 2, total]}
    return {"job": str(job), "overrides": list(overrides), "status": "completed", **told, **figures, "memory": memory}


# ---- laws ------------------------------------------------------------------------------------------------------------


def test_the_published_figures_of_both_laws() -> None:
    """p = 0.9, that is s = 0.1; REFERENCE figures."""
    workers = (2, 4, 8, 16)
    assert [round(amdahl(0.1, n), 3) for n in workers] == [1.818, 3.077, 4.706, 6.4]
    assert [round(gustafson(0.1, n), 3) for n in workers] == [1.9, 3.7, 7.3, 14.5]
    assert fit_amdahl(workers, [1 / amdahl(0.1, n) for n in workers]).limit == pytest.approx(10)


@given(SIZES, SERIAL, st.floats(1e-3, 1e3))
def test_amdahl_is_found_again(sizes: list[int], serial: float, one: float) -> None:
    fit = fit_amdahl(sizes, [one / amdahl(serial, n) for n in sizes])
    assert fit.serial == pytest.approx(serial, abs=1e-6) and fit.one == pytest.approx(one, rel=1e-6)
    assert fit.deviation < 1e-6 and fit.exact == (len(sizes) == 2)
    for n in sizes:
        assert fit.speedup(n) == pytest.approx(amdahl(serial, n), rel=1e-4)


@given(SIZES, SERIAL, st.floats(1e-3, 1e3))
def test_gustafson_is_found_again(sizes: list[int], serial: float, one: float) -> None:
    fit = fit_gustafson(sizes, [one * gustafson(serial, n) for n in sizes])
    assert fit.serial == pytest.approx(serial, abs=1e-6) and fit.one == pytest.approx(one, rel=1e-6)
    assert fit.limit is None or fit.serial == 1


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-3, 1e3)), min_size=2, max_size=8))
def test_a_serial_fraction_is_one_whatever_was_measured(points: list[tuple[int, float]]) -> None:
    workers, values = zip(*points, strict=True)
    if len(set(workers)) < 2:
        return
    for fit in (fit_amdahl(workers, values), fit_gustafson(workers, values)):
        assert 0 <= fit.serial <= 1 and fit.one > 0


def test_an_impossible_speed_up_is_no_negative_fraction() -> None:
    """More than one for one: the best of the law is a serial fraction of 0, and the deviation tells."""
    fit = fit_amdahl([1, 2, 4], [1.0, 0.4, 0.15])
    assert fit.serial == 0 and fit.limit is None and fit.deviation > 0.1
    slower = fit_amdahl([1, 2], [1.0, 1.5])
    assert slower.serial == 1 and slower.limit == 1


@pytest.mark.parametrize("fit", [fit_amdahl, fit_gustafson])
def test_fewer_than_two_sizes_are_refused(fit: Any) -> None:
    with pytest.raises(ValueError, match=r"law needs at least two different numbers of workers to be fitted, found 4$"):
        fit([4, 4, 4], [1.0, 1.1, 1.0])
    with pytest.raises(ValueError, match="found none"):
        fit([], [])
    with pytest.raises(ValueError, match="positive measurements"):
        fit([1, 2], [1.0, 0.0])


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_the_serial_part_of_a_pipeline_is_one_over_m(microbatches: int) -> None:
    """GPipe on n equal ranks, the model shared by them: (M+n-1)/(M n) of one rank's step."""
    sizes, times = [1, 2, 4, 8], []
    for ranks in sizes:
        program = build("gpipe", ranks, microbatches)
        costs = {"forward": 1 / ranks, "input_backward": 1 / ranks, "weight_backward": 1 / ranks, "transfer": 0}
        timeline = simulate(program, Costs.from_settings(costs, program.placement, microbatches))
        times.append(figures(program, timeline).makespan)
    assert fit_amdahl(sizes, times).serial == pytest.approx(1 / microbatches)


# ---- the front -------------------------------------------------------------------------------------------------------

POINTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20)


@given(POINTS)
def test_the_front_is_what_nothing_dominates(points: list[tuple[int, int]]) -> None:
    def dominated(p: tuple[int, int]) -> bool:
        return any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)

    found = front(points)
    assert sorted(found) == [i for i, p in enumerate(points) if not dominated(p)]
    assert [points[i] for i in found] == sorted(points[i] for i in found)


def test_the_front_of_a_sweep_leaves_out_what_did_not_complete() -> None:
    rows = [row(0, "a=1", step=0.2, total=100), row(1, "a=2", step=0.1, total=200), row(2, "a=3", step=0.3, total=150)]
    rows.append(row(3, "a=4", step=0.01, total=1) | {"status": "failed", "error": "no"})
    (found,) = fronts(sweep_of(rows))
    assert [found.points[i][2].job for i in found.best] == ["1", "0"] and len(found.points) == 3
    assert found.time.key == "step"


def test_jobs_with_different_batches_are_compared_by_the_sample() -> None:
    small, large = row(0, step=0.1), row(1, step=0.15, global_batch_size=64)
    (found,) = fronts(sweep_of([small, large]))
    assert found.time.name == "time per sample"
    assert [found.points[i][2].job for i in found.best] == ["1"]


def test_plans_are_compared_at_one_size() -> None:
    rows = [
        {"job": str(j), "status": "completed", "mode": "plan", "schedule": s, "ranks": 2, "microbatches": m,
         "plan": {"cost": cost, "peak": peak}}
        for j, (s, m, cost, peak) in enumerate([("gpipe", 4, 15, 4), ("1f1b", 4, 15, 2), ("gpipe", 8, 27, 8),
                                                ("zb_v", 8, 24, 2)])
    ]  # fmt: skip
    found = fronts(sweep_of(rows))
    assert [each.among for each in found] == ["2 ranks, 4 micro-batches", "2 ranks, 8 micro-batches"]
    assert [[each.points[i][2].job for i in each.best] for each in found] == [["1"], ["3"]]


# ---- what was swept --------------------------------------------------------------------------------------------------


def test_swept_keys_are_those_in_which_jobs_differ() -> None:
    rows = [
        row(0, "schedule=gpipe", "model=sleep", "pipeline.microbatches=16", schedule="gpipe", microbatches=16),
        row(1, "schedule=1f1b", "model=sleep", "pipeline.microbatches=8", "+model.x=[1,2]", microbatches=8),
        {"job": "2", "overrides": ["schedule=1f2b", "model=sleep"], "status": "failed", "error": "no\nmore"},
        {"job": "3", "overrides": [], "status": "unfinished", "error": "no summary"},
    ]
    sweep = sweep_of(rows)
    assert sweep.swept == {
        "schedule": ["gpipe", "1f1b", "1f2b", UNKNOWN],
        "pipeline.microbatches": ["8", "16", UNKNOWN],
        "model.x": [UNSET, "[1,2]", UNKNOWN],
    }
    assert sweep.varied["pipeline.microbatches"] == ["8", "16"] and "model" not in sweep.swept
    assert sweep.results[0].words == "gpipe, micro-batches 16, model.x (default)"
    assert sweep.results[2].reason == "no" and sweep.results[2].figures == {}


def test_values_come_in_order() -> None:
    assert ordered(["16", "b", "2", "a", "16", "1e1", "inf"]) == ["2", "1e1", "16", "b", "a", "inf"]


# ---- scaling ---------------------------------------------------------------------------------------------------------


def replicas(job: int, n: int, batch: int, step: float) -> dict[str, Any]:
    words = (f"data_parallel.replicas={n}", f"train.global_batch_size={batch}")
    return row(job, *words, replicas=n, global_batch_size=batch, step=step)


def test_a_fixed_batch_is_amdahls_case_and_a_growing_one_gustafsons() -> None:
    fixed = [replicas(n, n, 64, 0.4 / amdahl(0.2, n)) for n in (1, 2, 4)]
    growing = [replicas(10 + n, n, 8 * n, 0.1 * n / gustafson(0.05, n)) for n in (2, 4)]
    found, refused = curves(sweep_of(fixed + growing))
    assert not refused
    assert [(c.fit.law, c.grows, int(c.batch), [p[0] for p in c.points]) for c in found] == [
        ("Amdahl", False, 64, [1, 2, 4]),
        ("Gustafson", True, 8, [2, 4]),
    ]
    assert found[0].fit.serial == pytest.approx(0.2) and found[1].fit.serial == pytest.approx(0.05)
    assert "at most 5.0 times one" in found[0].sentence and "The global batch is 64" in found[0].sentence
    assert "grows with the replicas (8 samples each)" in found[1].sentence and "measure a third" in found[1].sentence
    rows = scaling_rows(found[0])
    assert rows[0] == ["job", "replicas", "step ms", "samples/s", "speed-up", "efficiency", "Amdahl says"]
    assert rows[2] == ["2", "2", "240.0", "266.7", "1.67", "83.3 %", "1.67"]


def test_only_jobs_alike_in_all_else_are_one_curve() -> None:
    rows = [
        row(j, f"schedule={s}", f"pipeline.ranks={p}", f"seed={j}", schedule=s, ranks=p, step=0.1 / p)
        for j, (s, p) in enumerate([("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("1f1b", 2), ("1f1b", 2)])
    ]
    found, _ = curves(sweep_of(rows))
    assert [(c.common, [p[3].job for p in c.points]) for c in found if not c.grows] == [
        ("schedule gpipe", ["0", "1"]),
        ("schedule 1f1b", ["2", "3", "4"]),  # seeds are repetitions
    ]


def test_where_no_law_applies_it_is_said() -> None:
    rows = [replicas(0, 1, 32, 0.1), replicas(1, 2, 48, 0.1)]
    found, refused = curves(sweep_of(rows))
    assert not found and "Sweep data_parallel.replicas with at least two values" in refused[0]
    rows[1] |= {"status": "failed", "error": "no"}
    assert curves(sweep_of(rows))[1]
    assert curves(sweep_of([row(0, "a=1"), row(1, "a=2")])) == ([], [])


# ---- plain, data-parallel, model-parallel ----------------------------------------------------------------------------


def way(job: int, ranks: int, replicas: int, **more: Any) -> dict[str, Any]:
    memory = {"parameters": [3000, 2000], "gradients": [1000, 2000], "buckets": [500, 600], "optimizer_state": [0, 0],
              "activations": [9000, 100], "total": [13500, 4700]}  # fmt: skip
    ranked = {"per_rank": [{"compute": 0.06}, {"compute": 0.02}]}
    return row(job, f"pipeline.ranks={ranks}", ranks=ranks, replicas=replicas) | {
        "memory": memory, "bubble": ranked, "bytes_sent_per_device": [700, 1500],
        "allreduce": {"bytes_sent_per_rank": 600}, **more,
    }  # fmt: skip


def test_the_ways_to_train_in_their_order() -> None:
    rows = way_rows(sweep_of([way(0, 2, 2), way(1, 2, 1), way(2, 1, 2), way(3, 1, 1)]))
    assert rows[0] == HEAD
    assert [line[:4] for line in rows[1:]] == [
        ["plain", "3", "1", "32"],
        ["data-parallel", "2", "2", "16"],
        ["model-parallel", "1", "2", "32"],
        ["both", "0", "4", "16"],
    ]
    assert rows[1][4:] == ["100.0", "320.0", "1.5 kB", "600 B", "3.0 kB", "2.6 kB", "0 B", "9.0 kB", "13.5 kB", "1.50"]


def test_one_way_is_no_comparison_and_unknown_sizes_are_dashes() -> None:
    assert way_rows(sweep_of([way(0, 2, 1), way(1, 4, 1)])) == []
    old = {k: v for k, v in row(1, replicas=2).items() if k != "memory"}
    rows = way_rows(sweep_of([row(0, ranks=1), old]))
    assert rows[2][6:] == ["-"] * 8
