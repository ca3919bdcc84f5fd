"""costs.json: medians of what a run's whole steps took, layer by layer where only the layers know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded
import torch
from harness import run_threads, settings
from hypothesis import given
from hypothesis import strategies as st

from engine.pipeline.stage.activations import saved_bytes
from engine.predict.costs import COSTS_NAME, SHARES, shares

MS = recorded.MS


def left(folder: Path, of: Any, steps: int = 4, **keywords: Any) -> dict[str, Any]:
    """costs.json of a recorded run."""
    record, _ = recorded.recorder(of, folder)
    recorded.traced_run(record, steps, **keywords)
    record.finish("completed")
    found: dict[str, Any] = json.loads((folder / COSTS_NAME).read_text())
    return found


def test_medians_are_those_of_the_steps(tmp_path: Path) -> None:
    of = recorded.job("1f1b", 3, 4, replicas=2)
    found = left(tmp_path, of, durations=recorded.costs(of.compute, slow=1), transfer=MS // 2)
    assert np.allclose(found["duration"], [[[0.002, 0.006, 0.002], [0.004, 0.012, 0.004], [0] * 3, [0] * 3]] * 2)
    assert np.allclose(found["spread"], 1.0) and np.shape(found["spread"]) == (3, 4, SHARES)
    assert np.allclose(found["delay"], [[0.0005, 0.0005, 0], [0.0005, 0.0005, 0]])
    assert np.allclose(found["step"], [0.001] * 6)
    assert (found["ranks"], found["replicas"], found["microbatches"], found["rows"]) == (3, 2, 4, 8.0)
    assert [layer["name"] for layer in found["layers"]] == ["block0", "block1", "block2"]
    assert [layer["parameter_bytes"] for layer in found["layers"]] == [40, 80, 120]


def test_the_first_step_is_left_out_and_the_spread_is_relative_to_the_own_stage(tmp_path: Path) -> None:
    of = recorded.job("gpipe", 2, 4)
    record, _ = recorded.recorder(of, tmp_path)
    usual, start = recorded.costs(of.compute, slow=1), 0
    for step, times in enumerate((10, 1, 1, 2)):
        timeline = recorded.measured(of.compute, usual * times, start=start)
        start = int(timeline.windows.max())
        for each in recorded.step_records(of, step, timeline):
            record(each)
    record.finish("completed")
    found = json.loads((tmp_path / COSTS_NAME).read_text())
    assert found["steps"] == 3
    assert np.allclose(found["duration"][0][0], [0.002, 0.006])
    spread = np.array(found["spread"])  # of each step
    assert np.allclose(spread[:2], 1) and np.allclose(spread[2, :2], 2)


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(1, 1000)), min_size=1, max_size=40))
def test_shares_keep_the_sum_and_the_order(drawn: list[tuple[float, float]]) -> None:
    values, weights = np.array(drawn).T
    found = shares(values, weights)
    assert found.mean() == pytest.approx(np.average(values, weights=weights))
    assert (np.diff(found) >= -1e-9).all()
    assert values.min() - 1e-9 <= found[0] and found[-1] <= values.max() + 1e-9
    assert np.allclose(found, shares(values, 3 * weights))


def test_shares_of_a_few_equal_ones_are_these() -> None:
    found = shares(np.array([3.0, 1.0]), np.ones(2))
    assert np.allclose(found, [1.0] * 8 + [2.0] + [3.0] * 8)
    assert np.allclose(shares(np.array([2.0]), np.zeros(1)), 2.0)


def test_a_jolt_of_a_short_computation_is_not_one_of_a_long_one(tmp_path: Path) -> None:
    """50 ms in one backward of 10 us are not 5000 times in one of 10 ms."""
    of = recorded.job("gpipe", 2, 4)
    record, _ = recorded.recorder(of, tmp_path)
    start = 0
    for step in range(4):
        durations = recorded.costs(of.compute)
        durations[:2, 0], durations[:2, 1] = 10 * MS, MS // 100
        durations[1, 1, step] += 50 * MS
        timeline = recorded.measured(of.compute, durations, start=start)
        start = int(timeline.windows.max())
        for each in recorded.step_records(of, step, timeline):
            record(each)
    record.finish("completed")
    found = json.loads((tmp_path / COSTS_NAME).read_text())
    assert np.allclose(found["duration"][0][1], [0.01, 1e-5])
    for spread in found["spread"]:
        assert np.allclose(spread[1][:-1], 1)
        assert np.mean(spread[1]) * 4 * 0.01001 == pytest.approx(4 * 0.01001 + 0.05)  # all that the step took


@pytest.mark.parametrize(("microbatches", "samples"), [(2, 6), (4, 32)])
def test_a_short_batch_is_another_size(microbatches: int, samples: int, tmp_path: Path) -> None:
    """In fewer micro-batches, or in as many smaller ones."""
    of = recorded.job("gpipe", 2, 4)
    short = recorded.job("gpipe", 2, microbatches).compute
    record, _ = recorded.recorder(of, tmp_path)
    start = 0
    for step, (program, count) in enumerate(((of.compute, 64), (of.compute, 64), (short, samples))):
        durations = recorded.costs(program) * (count / 64)
        timeline = recorded.measured(program, durations, start=start)
        start = int(timeline.windows.max())
        sizes = {"samples": count, "microbatches": program.microbatches}
        for each in recorded.step_records(of, step, timeline, **sizes):
            record(each)
    record.finish("completed")
    costs = json.loads((tmp_path / COSTS_NAME).read_text())
    (found,) = costs["short"]
    assert found["rows"] == samples / microbatches
    assert np.allclose(found["duration"][1], [0.004 * samples / 64] * 2)
    assert costs["steps"] == 1 and np.allclose(costs["duration"][0][1], 0.004) and np.allclose(costs["spread"], 1)


def test_nothing_is_left_where_no_whole_step_was_traced(tmp_path: Path) -> None:
    of = recorded.job()
    record, _ = recorded.recorder(of, tmp_path)
    for step in range(2):
        for each in recorded.step_records(of, step):
            record(each)
    record.finish("completed")
    assert not (tmp_path / COSTS_NAME).exists()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_layers_add_up_to_what_a_stage_leaves(schedule: str) -> None:
    ran = run_threads(settings(schedule, 2, 4))
    for rank, worker in ran.workers.items():
        steps = [record for record in ran.of("step") if record.meta["rank"] == rank]
        table = steps[-1].arrays["layers"]
        (stage,) = worker.stages.values()
        loss = [len(ran.job.layers)] if rank == 1 else []
        assert table[:, 0].tolist() == [layer.number for layer in stage.layers] + loss
        assert table[:, 2].sum() == stage._saved[4] and (table[:, 2] > 0).any()
        assert table[:, 3].sum() == sum(p.nbytes for layer in stage.layers for p in layer.module.parameters())
        spans = steps[-1].arrays["spans"]
        forwards = spans[spans[:, 0] == 0]
        assert 0 < table[:, 1].sum() <= (forwards[:, 4] - forwards[:, 3]).sum()
        assert steps[-1].meta["rows"] == 4


def test_what_a_layer_sends_is_known_wherever_it_could_be_cut() -> None:
    job = run_threads(settings("gpipe", 2, 4)).job
    at = job.split[1] - 1
    spec = job.boundaries["train", 4][0].tensors[0]
    assert job.layers[at].sends is not None
    assert job.layers[at].sends[0] >= 8 * int(np.prod(spec.shape))
    assert all(layer.sends is not None for layer in job.layers)


def test_parts_of_a_graph_count_every_storage_once() -> None:
    x = torch.ones(4, requires_grad=True)
    y = x.exp()  # saves its result
    z = y * y  # saves y twice, which is counted already
    w = z.sin()  # saves z
    ends = [[y.grad_fn], [z.grad_fn], [w.grad_fn], [w.grad_fn, None]]
    assert saved_bytes(ends, []) == [16, 0, 16, 0]
    assert saved_bytes(ends, [z]) == [16, 0, 0, 0]
    assert saved_bytes([[w.grad_fn]], []) == [32]
