"""DistributedOptimizer where a loop is unusual: closures, gradients on one rank only, parameters that come or thaw."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loops import BUILDING, DATA, built, on_ranks, sgd
from torch import Tensor, nn

from engine.distributed import (
    Compression,
    DistributedOptimizer,
    World,
    broadcast_optimizer_state,
)

Made = Callable[[nn.Module], torch.optim.Optimizer]


class TwoLooks(torch.optim.Optimizer):
    """Evaluates its closure twice, as sharpness-aware minimisation does: where it stands, and a step uphill from there
    (Foret et al. 2021, ICLR, arXiv 2010.01412)."""

    def __init__(self, parameters: Any, lr: float, radius: float) -> None:
        super().__init__(parameters, {"lr": lr, "radius": radius})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        (group,) = self.param_groups
        uphill = [group["radius"] * p.grad for p in group["params"]]
        for p, way in zip(group["params"], uphill, strict=True):
            p.add_(way)
        with torch.enable_grad():
            closure()
        for p, way in zip(group["params"], uphill, strict=True):
            p.sub_(way).sub_(group["lr"] * p.grad)
        return loss


def closed(net: nn.Module, optimizer: Any, take: Callable[[Tensor], Tensor], passes: int = 1) -> list[float]:
    """A loop of closures; what the steps returned."""
    losses = []
    for batch in DATA:

        def evaluate(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), dtype=batch.dtype)
            for part in take(batch).chunk(passes):
                loss = net(part).square().mean() / passes
                loss.backward()
                total += loss.detach()
            return total

        losses.append(float(optimizer.step(evaluate)))
    return losses


@pytest.mark.parametrize(
    "make",
    [sgd, lambda n: torch.optim.Adam(n.parameters(), lr=0.01), lambda n: TwoLooks(n.parameters(), 0.1, 0.05)],
    ids=["sgd", "adam", "two looks"],
)
@pytest.mark.parametrize(("size", "passes"), [(1, 1), (2, 1), (3, 2)])
def test_closures_train_as_in_one_process(size: int, passes: int, make: Made) -> None:
    def main(world: World) -> tuple[dict[str, Tensor], list[float]]:
        net = built()
        optimizer = DistributedOptimizer(
            make(net), net.named_parameters(), backward_passes_per_step=passes, bucket_bytes=100, world=world
        )
        losses = closed(net, optimizer, lambda batch: batch[world.rank :: size], passes)
        return net.state_dict(), losses

    alone = built()
    expected = closed(alone, make(alone), lambda batch: batch)
    ranks = on_ranks(size, main)
    for state, _ in ranks:
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
    means = [sum(step) / size for step in zip(*(losses for _, losses in ranks), strict=True)]
    assert means == pytest.approx(expected, rel=1e-9)  # each rank is told of its own loss


def test_a_closure_that_leaves_the_backward_to_the_loop() -> None:
    """Gradients from before the step are reduced as without a closure, and only once."""

    def main(world: World) -> tuple[Tensor, Any, int]:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), world=world)
        loss = net(DATA[0][world.rank :: 2]).square().mean()
        loss.backward()
        said = optimizer.step(lambda: "told")
        return net[0].weight.detach(), said, optimizer._sync._step

    net = built()
    optimizer = sgd(net)
    net(DATA[0]).square().mean().backward()
    optimizer.step()
    for weight, said, rounds in on_ranks(2, main):
        torch.testing.assert_close(weight, net[0].weight.detach(), rtol=1e-9, atol=1e-12)
        assert said == "told" and rounds == 1


def test_ranks_that_step_by_closures_may_join() -> None:
    def main(world: World) -> dict[str, Tensor]:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), world=world)
        for batch in DATA[: 4 - 2 * world.rank]:

            def evaluate(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = net(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(evaluate)
        assert optimizer.join() == 0
        return net.state_dict()

    first, second = on_ranks(2, main)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_what_decides_by_its_loss_is_refused() -> None:
    (world,) = on_ranks(1, lambda world: world)
    with pytest.raises(ValueError, match="LBFGS decides by its loss"):
        DistributedOptimizer(torch.optim.LBFGS(built().parameters()), world=world)


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_a_gradient_on_one_rank_only_is_a_part_of_the_mean(bucket_bytes: int) -> None:
    """The other rank did not use the parameter: for the mean that is a zero, as in the one process."""

    def main(world: World) -> Tensor:
        net, extra = built(), built(1)
        model = nn.ModuleList([net, extra])
        optimizer = DistributedOptimizer(sgd(model), model.named_parameters(), bucket_bytes=bucket_bytes, world=world)
        out = net(DATA[0][world.rank :: 2]).square().mean()
        if world.rank == 1:
            out = out + extra(DATA[1]).square().mean()
        out.backward()
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    net, extra = built(), built(1)
    model = nn.ModuleList([net, extra])
    optimizer = sgd(model)
    (net(DATA[0]).square().mean() + extra(DATA[1]).square().mean() / 2).backward()
    optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for found in on_ranks(2, main):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def frozen_part(world: World) -> tuple[nn.Module, Any]:
    net = built()
    net[0].requires_grad_(False)
    return net, DistributedOptimizer(sgd(net), net.named_parameters(), world=world)


def test_a_parameter_that_thaws_would_be_trained_on_each_rank_alone_and_is_refused() -> None:
    def main(world: World) -> str:
        net, optimizer = frozen_part(world)
        net(DATA[0]).square().mean().backward()
        optimizer.step()
        net[0].requires_grad_(True)
        optimizer.zero_grad()
        net(DATA[0]).square().mean().backward()
        with pytest.raises(ValueError) as refused:
            optimizer.step()
        return str(refused.value)

    assert (
        on_ranks(2, main) == ["0.weight was frozen when training began and has a gradient now: unfreeze it before"] * 2
    )


def test_a_parameter_that_freezes_stays_as_it_is() -> None:
    def main(world: World) -> tuple[Tensor, Tensor, Tensor]:
        net = built()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), world=world)
        for step, batch in enumerate(DATA):
            if step == 2:
                net[0].requires_grad_(False)
                then = net[0].weight.detach().clone()
            optimizer.zero_grad()
            net(batch[world.rank :: 2]).square().mean().backward()
            optimizer.step()
        return then, net[0].weight.detach(), net[2].weight.detach()

    (then, frozen, other), (_, same, alike) = on_ranks(2, main)
    assert torch.equal(then, frozen) and torch.equal(frozen, same) and torch.equal(other, alike)


def test_a_parameter_that_slips_into_a_group_is_refused() -> None:
    def main(world: World) -> str:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), world=world)
        optimizer.param_groups[0]["lr"] = 0.05  # what else a group holds may change
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
        net(DATA[0]).square().mean().backward()
        with pytest.raises(ValueError) as refused:
            optimizer.step()
        return str(refused.value)

    for said in on_ranks(2, main):
        assert said.startswith("param_groups[0]['params'][6], of shape (3,), was not there")


def test_a_rank_that_ends_early_is_missed_at_once_with_what_to_do() -> None:
    gone = threading.Event()

    def main(world: World) -> str:
        net = built()
        optimizer = DistributedOptimizer(sgd(net), net.named_parameters(), world=world)
        if world.rank == 1:
            world.transport.abort()
            gone.set()
            return ""
        assert gone.wait(60)
        net(DATA[0]).square().mean().backward()
        with pytest.raises(RuntimeError) as lost:
            optimizer.step()
        return str(lost.value)

    said = on_ranks(2, main)[0]
    assert "missing: rank 1, not in step 0. Out of samples before the others? Then join() first." in said


# -- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize(
    ("dtype", "gradients", "mean"),
    [
        (torch.complex64, (1 + 2j, 3 - 2j, 5 + 0j), 3 + 0j),
        (torch.complex128, (1j, 2j, 3j), 2j),
        (torch.float16, (40000.0, 60000.0, 50000.0), 50000.0),  # the sum is beyond what fp16 holds
        (torch.bfloat16, (3e38, -3e38, 0.0), 0.0),
        (torch.float64, (1.0, 2.0, 3.0), 2.0),
    ],
)
def test_the_mean_of_parameters_of_every_dtype(
    compression: Compression, dtype: torch.dtype, gradients: tuple[complex, ...], mean: complex
) -> None:
    def main(world: World) -> tuple[Tensor, Tensor]:
        p = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression=compression, world=world)
        p.grad = torch.full((3,), gradients[world.rank], dtype=dtype)
        optimizer.step()
        whole = p.detach().clone()
        if world.rank:  # the mean is one over those that still have samples
            optimizer.join()
        else:
            p.grad = torch.full((3,), gradients[0], dtype=dtype)
            optimizer.step()
            optimizer.join()
        return whole, p.detach() - whole

    eps = max(torch.finfo(dtype).eps, 0 if compression.dtype is None else torch.finfo(compression.dtype).eps)
    for whole, alone in on_ranks(3, main):
        torch.testing.assert_close(whole, torch.full((3,), -mean, dtype=dtype), rtol=4 * eps, atol=4 * eps)
        if abs(gradients[0]) < 1e4:  # elsewhere the difference of two halves has few digits left
            torch.testing.assert_close(
                alone, torch.full((3,), -gradients[0], dtype=dtype), rtol=16 * eps, atol=16 * eps
            )


def test_the_state_of_a_parameter_stays_laid_out_as_the_parameter() -> None:
    """Fused optimizers go through a parameter and its momenta by their memory, whatever their strides."""

    def main(world: World) -> tuple[Tensor, Any]:
        with BUILDING:
            torch.manual_seed(2)
            weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64).t())
        optimizer = DistributedOptimizer(torch.optim.Adam([weight], lr=0.1, fused=True), world=world)
        for step, batch in enumerate(DATA):
            optimizer.zero_grad()
            (weight @ batch[world.rank :: 2].t()).tanh().sum().backward()
            optimizer.step()
            if step == 1:
                broadcast_optimizer_state(optimizer, 1, world=world)
        return weight.detach(), optimizer.state[weight]["exp_avg"].stride()

    with BUILDING:
        torch.manual_seed(2)
        weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64).t())
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for batch in DATA:
        optimizer.zero_grad()
        ((weight @ batch.t()).tanh().sum() / 2).backward()
        optimizer.step()
    for found, strides in on_ranks(2, main):
        torch.testing.assert_close(found, weight.detach(), rtol=1e-9, atol=1e-12)
        assert strides == weight.stride() == (1, 4)
