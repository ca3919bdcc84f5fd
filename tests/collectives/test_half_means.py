"""Means in half precision: of equal values that value, from the smallest subnormal to the largest finite number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from workers import joined, over_gloo, over_shared, over_threads

from engine import collectives as ours
from engine.collectives import COLLECTIVES, Group, Hierarchical, ReduceOp
from engine.distributed import Compression, DistributedOptimizer, World
from engine.transport import Transport

HALF = [torch.float16, torch.bfloat16]
WORLDS = range(2, 10)


def values(dtype: torch.dtype) -> Tensor:
    """The ends of the range, and numbers whose significands are full."""
    info = torch.finfo(dtype)
    ends = torch.tensor([info.smallest_normal * info.eps, info.smallest_normal, info.max], dtype=dtype)
    steps = torch.tensor([1, 2, 3], dtype=torch.int16)
    near = torch.cat([ends[0].view(torch.int16) * steps, ends[2].view(torch.int16) - steps]).view(dtype)
    between = (torch.rand(50, generator=torch.Generator().manual_seed(1)) + 1).to(dtype)
    found = torch.cat([ends, near, between, torch.zeros(1, dtype=dtype)])
    assert found[0] > 0 and found.isfinite().all()
    return torch.cat([found, -found])


def all_reduced(size: int, name: str, part: Any, run: Any = over_threads) -> list[Tensor]:
    kind = Hierarchical.grouped(2 if size % 2 == 0 else None) if name == "hierarchical" else COLLECTIVES[name]

    def main(transport: Transport) -> Tensor:
        mine: Tensor = part(transport.rank).clone()
        joined(transport, kind).all_reduce(mine, ReduceOp.MEAN)
        return mine

    return run(size, main)


def require(found: list[Tensor], expected: Tensor) -> None:
    for each in found:
        assert each.dtype == expected.dtype
        assert torch.equal(each, expected), torch.stack([each, expected])[:, each != expected]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.slow(keep=7)
def test_the_mean_of_equal_values_is_that_value_by_every_algorithm(name: str, dtype: torch.dtype) -> None:
    given = values(dtype)
    for size in WORLDS:
        require(all_reduced(size, name, lambda _: given), given)


@pytest.mark.parametrize("run", [over_gloo, over_shared], ids=["gloo", "shared"])
@pytest.mark.parametrize("name", ["native", "ring"])
@pytest.mark.slow(keep=3)
def test_and_between_processes_too(name: str, run: Any) -> None:
    for dtype in HALF:
        given = values(dtype)
        require(all_reduced(5, name, lambda _, given=given: given, run), given)


@pytest.mark.parametrize("dtype", HALF)
def test_a_mean_is_rounded_once(dtype: torch.dtype) -> None:
    parts = torch.randn(6, 200, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = all_reduced(6, "ring", lambda rank: parts[rank])
    exact = parts.double().mean(0)
    step = torch.finfo(dtype).eps / 2
    for each in found:
        assert ((each.double() - exact).abs() <= step * exact.abs() + 1e-7).all()


def test_a_sum_is_as_it_was() -> None:
    """65504 + 65504 is beyond fp16, in every algorithm; 4 + 2^-8 + ... is rounded at each hop."""

    def main(transport: Transport) -> list[Tensor]:
        found = []
        for value in (65504.0, 1.0009765625):
            mine = torch.full((3,), value, dtype=torch.float16)
            joined_ring.setdefault(transport.rank, joined(transport, COLLECTIVES["ring"])).all_reduce(mine)
            found.append(mine)
        return found

    joined_ring: dict[int, Any] = {}
    hop = torch.tensor(1.0009765625, dtype=torch.float16)
    two = (hop.float() + hop.float()).half()
    three = (two.float() + hop.float()).half()
    for large, small in over_threads(3, main):
        assert large.tolist() == [float("inf")] * 3
        assert small.tolist() == [float(three)] * 3


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", WORLDS)
def test_primitives_with_a_mean(size: int, dtype: torch.dtype) -> None:
    given = values(dtype)

    def main(transport: Transport) -> list[Tensor]:
        members = list(range(size))
        transport.open(Group.edges(members, "g"))
        group = Group(transport, members, "g")
        everywhere, there, kept = given.clone(), given.clone(), given.clone()
        ours.all_reduce(everywhere, ReduceOp.MEAN, group=group)
        ours.reduce(there, size - 1, ReduceOp.MEAN, group=group)
        ours.reduce_scatter(kept, [given] * size, ReduceOp.MEAN, group=group)
        whole, part = given.repeat(size), torch.empty_like(given)
        ours.reduce_scatter_tensor(part, whole, ReduceOp.MEAN, group=group)
        assert torch.equal(whole, given.repeat(size))  # inputs stay as they are
        return [everywhere, there, kept, part]

    for found in over_threads(size, main):
        require(found, given)


# -- in a training loop ------------------------------------------------------------------------------------------------


def gradients(
    size: int, given: Tensor, compression: Compression = Compression.none, joins: bool = False
) -> list[Tensor]:
    """What the gradients `given` of all ranks have become, each row in a bucket of its own; with `joins` the last rank
    has no samples."""
    store = HashStore()

    def main(transport: Transport) -> Tensor:
        world = World(transport, store)
        weights = [nn.Parameter(torch.zeros_like(row)) for row in given]
        optimizer = DistributedOptimizer(
            torch.optim.SGD(weights, lr=0.0), compression=compression, world=world, bucket_bytes=1
        )
        if joins and transport.rank == size - 1:
            optimizer.join()
            return torch.empty(0)
        torch.autograd.backward(weights, list(given))
        optimizer.synchronize()
        found = torch.stack([weight.grad.clone() for weight in weights])  # type: ignore[union-attr]
        optimizer.step()
        if joins:
            optimizer.join()
        return found

    found = over_threads(size, main)
    return found[:-1] if joins else found


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 9])
@pytest.mark.slow(keep=10)
def test_gradients_in_half_precision(size: int, dtype: torch.dtype, joins: bool) -> None:
    given = values(dtype)[None]
    require(gradients(size, given, joins=joins), given)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("wire", [Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("size", [2, 5, 9])
@pytest.mark.slow(keep=1)
def test_compressed_gradients(size: int, wire: Compression, joins: bool) -> None:
    """What a wire's dtype holds arrives as it was, each value alone: the scale goes by the largest of a bucket."""
    assert wire.dtype is not None
    given = values(wire.dtype).float()[::12, None].expand(-1, 5).contiguous()
    require(gradients(size, given, wire, joins), given)


def test_a_compressed_mean_of_the_largest_numbers_is_finite() -> None:
    given = torch.full((1, 5), 3e38)
    for found in gradients(5, given, Compression.bf16):
        assert found.isfinite().all()
        torch.testing.assert_close(found, given, rtol=2**-8, atol=0)
