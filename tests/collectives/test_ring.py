"""The ring: equal to one fixed order of additions, on every rank, for any size and dtype, at the published cost."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from workers import over_gloo, over_threads

from engine.collectives import COLLECTIVES, SUMMABLE, Collective, peers
from engine.transport import Edge, Transport

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
dtypes = st.sampled_from(sorted(SUMMABLE, key=str))
worlds = st.integers(1, 8)


def parts(world: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """What each rank contributes: numbers of very different magnitude, so that order and rounding show."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in FLOATS or dtype.is_complex:
        scale = 10.0 ** torch.randint(-2, 3, (world, size), generator=generator)
        return list((torch.randn(world, size, generator=generator) * scale).to(dtype))
    low = 0 if dtype == torch.uint8 else -128
    return list(torch.randint(low, 128, (world, size), generator=generator).to(dtype))


def folded(given_parts: Sequence[Tensor]) -> Tensor:
    """Chunk j is x_j + x_(j+1) + ..., from the left; half precision in fp32, rounded after every addition."""
    world = len(given_parts)
    half = given_parts[0].dtype in (torch.float16, torch.bfloat16)
    chunks = [part.tensor_split(world) for part in given_parts]
    result = []
    for j in range(world):
        total = chunks[j][j].clone()
        for step in range(1, world):
            other = chunks[(j + step) % world][j]
            total = (total.float() + other.float()).to(total.dtype) if half else total + other
        result.append(total)
    return torch.cat(result)


def summed(transport: Transport, tensor: Tensor, name: str = "ring") -> tuple[Tensor, Collective]:
    members = list(range(transport.world))
    transport.open(COLLECTIVES[name].edges(members, "x"))
    if name == "native" and transport.world > 1:
        transport.open_group(members, "x", backend=True)
    collective = COLLECTIVES[name](transport, members, "x")
    tensor = tensor.clone()
    collective.all_reduce(tensor)
    return tensor, collective


@settings(max_examples=120)
@given(world=worlds, size=st.integers(0, 70), dtype=dtypes, piece=st.sampled_from([16, 64, 10**6]), seed=st.integers(0))
@pytest.mark.slow
def test_equals_the_fixed_order_bitwise_on_every_rank(
    world: int, size: int, dtype: torch.dtype, piece: int, seed: int
) -> None:
    given_parts = parts(world, size, dtype, seed % 2**32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "PIECE_BYTES", piece)
        results = over_threads(world, lambda transport: summed(transport, given_parts[transport.rank]))
    expected = folded(given_parts)
    for tensor, collective in results:
        assert torch.equal(tensor, expected)
        assert collective.transport.hub.unmatched == 0


@given(world=worlds, size=st.integers(0, 200), dtype=dtypes)
def test_sends_the_bandwidth_optimal_number_of_bytes(world: int, size: int, dtype: torch.dtype) -> None:
    given_parts = parts(world, size, dtype)

    def main(transport: Transport) -> tuple[int, int]:
        _, collective = summed(transport, given_parts[transport.rank])
        edges = [e for e in COLLECTIVES["ring"].edges(range(world), "x") if e.src == transport.rank]
        return collective.bytes_sent, sum(transport.channel(edge).bytes_sent for edge in edges)

    results = over_threads(world, main)
    assert all(counted == carried for counted, carried in results)
    counts = [counted for counted, _ in results]
    # Each chunk crosses 2(N-1) channels; a rank is off the mean by at most the unevenness of two chunks.
    assert sum(counts) == 2 * (world - 1) * size * dtype.itemsize
    assert all(abs(world * count - sum(counts)) <= 2 * world * dtype.itemsize for count in counts)
    if size % world == 0:
        assert set(counts) == {2 * (world - 1) * size * dtype.itemsize // world}


def test_no_timing_moves_a_bit() -> None:
    given_parts = parts(4, 10_000, torch.float32)
    expected = folded(given_parts)

    def main(transport: Transport) -> bool:
        members = [0, 1, 2, 3]
        transport.open(COLLECTIVES["ring"].edges(members, "x"))
        collective = COLLECTIVES["ring"](transport, members, "x")
        jitter = random.Random(transport.rank)
        for _ in range(30):
            tensor = given_parts[transport.rank].clone()
            time.sleep(jitter.random() * 0.004)
            collective.all_reduce(tensor)
            if not torch.equal(tensor, expected):
                return False
        return True

    assert over_threads(4, main) == [True] * 4
    assert not torch.equal(expected, sum(given_parts))  # the example does tell orders apart


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_not_a_number_and_infinity_reach_everybody(dtype: torch.dtype) -> None:
    given_parts = [torch.zeros(6, dtype=dtype) for _ in range(3)]
    given_parts[1][2], given_parts[2][5] = float("nan"), float("inf")
    for tensor, _ in over_threads(3, lambda transport: summed(transport, given_parts[transport.rank])):
        assert tensor.isnan().tolist() == [False, False, True, False, False, False]
        assert tensor.isinf().tolist() == [False, False, False, False, False, True]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("size", [1, 7, 100_000, 600_000])
def test_over_gloo_as_over_threads(world: int, size: int) -> None:
    given_parts = parts(world, size, torch.bfloat16)
    expected = folded(given_parts)
    for tensor, _ in over_gloo(world, lambda transport: summed(transport, given_parts[transport.rank])):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_refuses_what_it_cannot_add(name: str) -> None:
    def refusal(tensor: Tensor) -> str:
        with pytest.raises(ValueError, match="all-reduce x") as caught:
            over_threads(1, lambda transport: summed(transport, tensor, name))
        return str(caught.value)

    assert "no sum of torch.bool is defined; use one of ['bfloat16', 'complex128'" in refusal(torch.zeros(3) > 0)
    assert "torch.float8_e5m2" in refusal(torch.zeros(3).to(torch.float8_e5m2))
    assert "contiguous and flat" in refusal(torch.zeros(2, 3))


def test_members_need_not_be_neighbours() -> None:
    members = [1, 4, 5]

    def main(transport: Transport) -> float:
        transport.open(COLLECTIVES["ring"].edges(members, "x"))
        if transport.rank not in members:
            return 0.0
        value = torch.tensor([float(transport.rank)])
        COLLECTIVES["ring"](transport, members, "x").all_reduce(value)
        return float(value)

    assert COLLECTIVES["ring"].edges(members, "x") == [Edge(1, 4, "x"), Edge(4, 5, "x"), Edge(5, 1, "x")]
    assert over_threads(6, main) == [0, 10, 0, 0, 10, 10]
