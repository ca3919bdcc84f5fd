"""Complex parameters, buffers, inputs and boundaries stay complex, in the run's precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import plain, run_threads, settings
from torch import Tensor

from engine.pipeline.dtypes import in_precision
from engine.settings import Eval

LOSS = {"_target_": "toys.TokenLoss"}


def wanted(target: str, schedule: str = "1f1b", ranks: int = 2, replicas: int = 1, **changes: Any) -> Any:
    model = {"_target_": f"peculiar.{target}", "loss": LOSS} | changes.pop("model", {})
    return settings(schedule, ranks, 4, replicas, model=model, **changes)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp64", torch.complex128), ("fp32", torch.complex64), ("bf16", torch.complex64)]
)
@pytest.mark.slow(keep=2)
def test_a_table_of_complex_numbers_keeps_its_imaginary_part(precision: str, dtype: torch.dtype) -> None:
    """And numbers of other kinds are left as they are."""
    ran = run_threads(wanted("rotary", precision=precision))
    state = ran.state()
    assert [state[f"a.{name}"].dtype for name in ("table", "mask", "seen")] == [dtype, torch.bool, torch.int64]
    assert torch.allclose(state["a.table"].imag, torch.arange(1, 5).to(state["a.table"].real.dtype).sin())
    if precision != "bf16":
        expected, losses = _rotary_by_hand(ran.job.settings)
        assert ran.losses()[0] == pytest.approx(losses[0], rel=1e-9 if precision == "fp64" else 1e-5)
        assert_close(state, expected, 1e-9 if precision == "fp64" else 1e-4)


def _rotary_by_hand(run: Any) -> tuple[dict[str, Tensor], list[float]]:
    """One plain process, whose layers are cast here part by part: floating ones as such, complex ones by hand."""
    import peculiar
    from harness import DTYPES, Batches, build_optimizer, building, dataset, make_loss, prepare

    real = DTYPES[run.precision]
    layers = []
    for index, (_, make) in enumerate(peculiar.rotary()):
        with building(run.seed, index):
            layer = make()
        for part in layer.modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_complex():
                        table[name] = torch.complex(tensor.real.to(real), tensor.imag.to(real))
                    elif tensor is not None and tensor.is_floating_point():
                        tensor.data = tensor.data.to(real)
        layers.append(layer)
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer, _ = build_optimizer(prepare(run, ".", "."), parameters)
    loss, data, losses = make_loss(run.model["loss"]), dataset(run.data, evaluation=False), []
    for indices in Batches(64, 16, 1, run.seed, True).shares(0, 3):
        value = torch.stack([data[i][0] for i in indices]).to(real)
        target = torch.stack([data[i][1] for i in indices])
        for layer in layers:
            value = layer(value)
        mean = loss(value, target) / loss.count(target, None)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean.detach()))
    names = [name for name, _ in peculiar.rotary()]
    return {f"{n}.{k}": v for n, x in zip(names, layers, strict=True) for k, v in x.state_dict().items()}, losses


@pytest.mark.parametrize(
    ("schedule", "ranks", "replicas"), [("gpipe", 2, 1), ("zb_h1", 2, 1), ("1f1b", 3, 2), ("dualpipe", 2, 1)]
)
@pytest.mark.parametrize("target", ["rotary", "spectral"])
@pytest.mark.slow(keep=2)
def test_complex_parameters_train_as_in_one_process(target: str, schedule: str, ranks: int, replicas: int) -> None:
    """Trained tables, complex layers and complex inputs: products, reductions, norms and boundaries."""
    model = {"trained": True} if target == "rotary" else {}
    data = {"_target_": "peculiar.Waves" if target == "spectral" else "toys.Tokens"}
    run = wanted(target, schedule, ranks, replicas, model=model, data=data, clip_norm=0.5)
    expected, losses = plain(run, microbatched=True)
    ran = run_threads(run)
    assert any(value.is_complex() for value in expected.values())
    assert ran.losses() == pytest.approx(losses, rel=1e-9)
    for replica in range(replicas):
        assert_close(ran.state(replica), expected, 1e-9)


def test_complex_buffers_are_lent_for_an_evaluation() -> None:
    """Replicas evaluate with the first one's buffers, of any kind."""
    data = {"_target_": "toys.Tokens", "evaluation": {"samples": 16}}
    ran = run_threads(wanted("rotary", replicas=2, data=data, eval=Eval(every=1)))
    alone = run_threads(wanted("rotary", replicas=1, data=data, eval=Eval(every=1)))
    got, expected = (sorted(r.meta["loss_sum"] for r in each.of("evaluation")) for each in (ran, alone))
    by_step: dict[int, float] = {}
    for record in ran.of("evaluation"):
        by_step[record.meta["step"]] = by_step.get(record.meta["step"], 0.0) + record.meta["loss_sum"]
    assert len(got) == 2 * len(expected)
    assert sorted(by_step.values()) == pytest.approx(expected, rel=1e-9)


def test_precisions() -> None:
    kinds = [torch.float16, torch.float64, torch.complex64, torch.int32, torch.bool]
    double = [torch.float64, torch.float64, torch.complex128, torch.int32, torch.bool]
    single = [torch.float32, torch.float32, torch.complex64, torch.int32, torch.bool]
    assert [in_precision(kind, torch.float64) for kind in kinds] == double
    assert [in_precision(kind, torch.float32) for kind in kinds] == single
