"""Data parallelism in one process: the same numbers as without it, and an honest account of what it costs."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from benchmarks import drawbacks
from benchmarks.layers import whole
from engine.demos.data_parallel import DataParallel

CPU = torch.device("cpu")
mean = nn.CrossEntropyLoss()


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, generator=generator).double(), torch.randint(0, 3, (rows,), generator=generator)


@given(devices=st.integers(1, 5), rows=st.integers(1, 9), steps=st.integers(1, 3))
@pytest.mark.slow
def test_steps_equal_those_of_the_plain_model(devices: int, rows: int, steps: int) -> None:
    """Also where there are fewer samples than devices."""
    parallel, plain = DataParallel(model(), [CPU] * devices), model()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (parallel.module, plain)]
    x, y = batch(rows)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ours = parallel.step(x, y, mean)
        loss = mean(plain(x), y)
        loss.backward()
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-12, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(parallel.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-13)


def test_each_of_its_costs_is_counted() -> None:
    parallel = DataParallel(model(), [CPU] * 4)
    x, y = batch(8)
    for _ in range(3):
        parallel.step(x, y, mean)
    counters, weights = parallel.counters, sum(p.nbytes for p in parallel.module.parameters())
    assert counters.steps == 3
    assert counters.threads == 3 * 4 * 2  # forward and backward
    outputs = 8 * 3 * 8
    assert counters.copied_bytes == {
        "scatter": 3 * 3 * (x.nbytes + outputs) // 4,  # the batch, and the gradient of the outputs
        "replicate": 3 * 3 * weights,
        "gather": 3 * 3 * outputs // 4,
        "reduce": 3 * 3 * weights,
    }
    phases = {"scatter", "replicate", "forward", "gather", "loss", "backward", "reduce"}
    assert set(counters.seconds) == phases
    assert min(counters.seconds.values()) > 0 and min(counters.busy) > 0


def test_buffers_of_the_first_device_are_the_models() -> None:
    norm = nn.BatchNorm1d(6).double()
    parallel, alone = DataParallel(norm, [CPU] * 2), copy.deepcopy(norm)
    x, _ = batch(8)
    parallel.step(x, x, nn.MSELoss())
    alone(x[:4])
    torch.testing.assert_close(norm.running_mean, alone.running_mean)


def test_an_absent_gradient_stays_absent() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    parallel = DataParallel(Half(), [CPU] * 2)
    parallel.step(*batch(4), mean)
    assert parallel.module.unused.weight.grad is None  # type: ignore[union-attr]
    assert parallel.module.used.weight.grad is not None  # type: ignore[union-attr]


def test_an_error_in_a_thread_is_raised() -> None:
    parallel = DataParallel(model(), [CPU] * 3)
    x, y = batch(6)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        parallel.step(x[:, :5], y, mean)
    with pytest.raises(ValueError, match="at least one device"):
        DataParallel(model(), [])


def test_a_batch_without_samples_is_refused() -> None:
    x, y = batch(0)
    with pytest.raises(ValueError, match="a batch without samples: leave that step out"):
        DataParallel(model(), [CPU] * 2).step(x, y, mean)


@pytest.mark.slow
def test_the_benchmark_measures_each_drawback() -> None:
    case = drawbacks.case_of("mlp", 2)
    one = drawbacks.in_one_process(case, 2)
    rows, features = 256, 512
    assert one["batch_copied_bytes"] == 4 * rows // 2 * (features + 10)  # the inputs, the gradient of ten outputs
    assert one["outputs_copied_bytes"] == 4 * rows // 2 * 10
    assert one["threads_started"] == 4
    assert one["weights_copied_bytes"] == sum(p.nbytes for p in whole(case.job).parameters())
    assert 0 < one["busy_least_over_most"] <= 1 and 0 < one["reduction_exposed_s"] < one["step_s"]
    lines = drawbacks.table("mlp", one, one).splitlines()
    assert len(lines) == 1 + len(one)
    assert lines[1].split()[:2] == ["step", "ms"]
    assert lines[-1].strip().startswith("busy least over most")
