"""Every all-reduce: right, bitwise alike on all ranks, at the published cost in bytes and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from workers import RUNS, copy_late, joined, over_threads

from engine.collectives import COLLECTIVES, Collective, Hierarchical, ReduceOp, peers
from engine.collectives.allreduce.auto import CANDIDATES, Auto
from engine.collectives.allreduce.costs import ALGORITHMS, LinkCosts, cheapest
from engine.collectives.topologies import Node, binomial, double_binary, flat
from engine.transport import Transport

OURS = [name for name in COLLECTIVES if name not in ("native", "auto")]
SIZES = range(1, 9)
worlds = st.integers(1, 8)


def reduced(
    world: int, kind: type[Collective], parts: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, run: Any = over_threads
) -> list[tuple[Tensor, int, int]]:
    """(result, bytes, messages) of each rank; twice over, so that buffers are used again."""

    def main(transport: Transport) -> tuple[Tensor, int, int]:
        collective = joined(transport, kind)
        first, second = parts[transport.rank].clone(), parts[transport.rank].clone()
        collective.all_reduce(first, op)
        sent = collective.bytes_sent, collective.messages_sent
        collective.all_reduce(second, op)
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        if kind is not Auto:  # it measures before its first
            assert (collective.bytes_sent, collective.messages_sent) == (2 * sent[0], 2 * sent[1])
        return first, *sent

    return run(world, main)


def numbers(world: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Of very different magnitude, so that another order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-2, 3, (world, size), generator=generator)
    return list((torch.randn(world, size, generator=generator) * scale).to(dtype))


# -- right -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
@settings(max_examples=60)
@given(
    world=worlds,
    size=st.integers(0, 70),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.complex64]),
    op=st.sampled_from(list(ReduceOp)),
    piece=st.sampled_from([16, 64, 10**6]),
    seed=st.integers(0, 2**32),
)
@pytest.mark.slow(keep=1)
def test_equals_the_reduction_and_is_the_same_bits_everywhere(
    name: str, world: int, size: int, dtype: torch.dtype, op: ReduceOp, piece: int, seed: int
) -> None:
    if op.refusal(dtype):
        return
    parts = numbers(world, size, dtype, seed)
    if op is ReduceOp.PRODUCT:
        parts = [torch.ones_like(p) + (p.abs() > 1).to(dtype) for p in parts]  # 1 or 2: exact
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "PIECE_BYTES", piece)
        results = reduced(world, COLLECTIVES[name], parts, op)
    for tensor, _, _ in results:
        assert torch.equal(tensor.view(torch.uint8), results[0][0].view(torch.uint8))
    close(results[0][0], expected(op, parts), parts)


def expected(op: ReduceOp, parts: Sequence[Tensor]) -> Tensor:
    """Computed in double width."""
    dtype = parts[0].dtype
    wide = torch.stack(list(parts)).to(torch.complex128 if dtype.is_complex else torch.float64)
    if dtype == torch.int32:
        wide = torch.stack(list(parts)).long()
    folds: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
        ReduceOp.SUM: lambda t: t.sum(0),
        ReduceOp.MEAN: lambda t: t.mean(0),
        ReduceOp.PRODUCT: lambda t: t.prod(0),
        ReduceOp.MIN: lambda t: t.amin(0),
        ReduceOp.MAX: lambda t: t.amax(0),
    }
    return folds[op](wide)


def close(got: Tensor, want: Tensor, parts: Sequence[Tensor]) -> None:
    """Exact for whole numbers; else within the rounding of as many additions, in units of the largest part."""
    if not (got.is_floating_point() or got.is_complex()):
        assert torch.equal(got, want.to(got.dtype))
        return
    largest = torch.stack([p.abs().to(torch.float64) for p in parts]).sum(0)
    error = (got.to(want.dtype) - want).abs()
    assert (error <= 1.01 * len(parts) * torch.finfo(got.dtype).eps * largest + 1e-7).all()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.slow(keep=25)
def test_sums_over_threads_and_gloo_alike(name: str, world: int, run: Any) -> None:
    parts = numbers(world, 50, torch.float64)
    results = reduced(world, COLLECTIVES[name], parts, run=run)
    for tensor, _, _ in results:
        torch.testing.assert_close(tensor, torch.stack(parts).sum(0))
        assert torch.equal(tensor, results[0][0])


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("world", [2, 3, 4, 6])
@pytest.mark.slow(keep=13)
def test_memory_that_is_still_being_sent_or_received_is_left_alone(
    name: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transport that copies some time after both ends have met, as a socket does."""
    copy_late(monkeypatch, seed=world)
    monkeypatch.setattr(peers, "PIECE_BYTES", 16)
    parts = [torch.full((24,), float(10**rank)) for rank in range(world)]
    for tensor, _, _ in reduced(world, COLLECTIVES[name], parts):
        assert tensor.unique().tolist() == [float("1" * world)]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_mean_of_large_fp16_numbers_is_no_infinity(name: str) -> None:
    parts = [torch.full((7,), 60000.0, dtype=torch.float16) for _ in range(4)]
    assert all(t.tolist() == [60000.0] * 7 for t, _, _ in reduced(4, COLLECTIVES[name], parts, ReduceOp.MEAN))


@pytest.mark.parametrize("name", OURS)
def test_a_signed_zero_is_the_same_everywhere(name: str) -> None:
    """The larger of 0 and -0 depends on their order: partners must agree on it."""
    parts = [torch.full((5,), -0.0 if rank % 2 else 0.0) for rank in range(4)]
    results = reduced(4, COLLECTIVES[name], parts, ReduceOp.MAX)
    assert {tuple(t.view(torch.int32).tolist()) for t, _, _ in results} == {
        tuple(results[0][0].view(torch.int32).tolist())
    }


def test_native_has_sums_only() -> None:
    with pytest.raises(ValueError, match="allreduce=native has no max; allreduce=ring does"):
        reduced(2, COLLECTIVES["native"], numbers(2, 3, torch.float32), ReduceOp.MAX)


# -- what it costs ---------------------------------------------------------------------------------------------------


def log2(size: int) -> int:
    return (size - 1).bit_length()


def traffic(name: str, world: int) -> tuple[list[float], list[int]]:
    """The formulas of bytes, in units of the tensor, and of messages, per rank."""
    ring = [2 * (world - 1) / world] * world
    tree = [len(n.children) + (n.parent is not None) for n in binomial(world)]
    if name == "ring":
        return ring, [2 * (world - 1)] * world
    if name == "double_ring":
        return ring, [(2 if world == 2 else 4 * (world - 1))] * world
    if name == "tree":
        return list(map(float, tree)), tree
    if name == "reduce_broadcast":
        star = [world - 1] + [1] * (world - 1)
        return list(map(float, star)), star
    if name == "recursive_doubling":
        return [float(log2(world))] * world, [log2(world)] * world
    if name == "halving_doubling":
        return ring, [2 * log2(world)] * world
    if name == "hierarchical":  # one host
        return ring, [2 * (world - 1)] * world
    both = [[len(n.children) + (n.parent is not None) for n in nodes] for nodes in double_binary(world)]
    return [(a + b) / 2 for a, b in zip(*both, strict=True)], [a + b for a, b in zip(*both, strict=True)]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8])
def test_bytes_and_messages_per_rank_are_those_of_the_formulas(name: str, world: int) -> None:
    if name in ("recursive_doubling", "halving_doubling") and world & (world - 1):
        return  # see the next test
    size = 2 * 840  # divisible by 2N for all N
    results = reduced(world, COLLECTIVES[name], numbers(world, size, torch.float32))
    shares, messages = traffic(name, world)
    assert [nbytes for _, nbytes, _ in results] == [round(share * size * 4) for share in shares]
    assert [count for _, _, count in results] == messages


@pytest.mark.parametrize("name", ["recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("world", [3, 5, 6, 7])
def test_other_numbers_than_powers_of_two_hand_over_and_take_back(name: str, world: int) -> None:
    """r pairs: one of each sends n and is sent n; the core of 2^k does what 2^k members do."""
    size, core = 2 * 840, 1 << (world.bit_length() - 1)
    inner, messages = traffic(name, core)
    results = reduced(world, COLLECTIVES[name], numbers(world, size, torch.float32))
    extra = world - core
    want = [(1.0, 1) if k < 2 * extra and k % 2 else (inner[0] + (k < 2 * extra), messages[0] + (k < 2 * extra))
            for k in range(world)]  # fmt: skip
    assert [(nbytes, count) for _, nbytes, count in results] == [(round(share * size * 4), n) for share, n in want]


@pytest.mark.parametrize(("hosts", "group_size"), [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 4), (4, 1)])
def test_hierarchical_sends_off_its_host_only_its_share(hosts: int, group_size: int) -> None:
    world, size = hosts * group_size, 840
    parts = numbers(world, size, torch.float64)
    kind = Hierarchical.grouped(group_size)

    def main(transport: Transport) -> tuple[Tensor, int]:
        collective = joined(transport, kind)
        tensor = parts[transport.rank].clone()
        collective.all_reduce(tensor)
        out = [e for e in kind.edges(range(world), "x") if e.src == transport.rank]
        far = [e for e in out if e.dst // group_size != transport.rank // group_size]
        return tensor, sum(transport.channel(edge).bytes_sent for edge in far)

    results = over_threads(world, main)
    for tensor, far in results:
        assert torch.equal(tensor, results[0][0])
        torch.testing.assert_close(tensor, torch.stack(parts).sum(0))
        assert far == 2 * (hosts - 1) * size * 8 // (group_size * hosts)


def test_hosts_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups of 2 replicas, but there are 5: choose an allreduce.group_size that"):
        Hierarchical.grouped(2).edges(range(5), "x")


# -- trees -----------------------------------------------------------------------------------------------------------


def depth(nodes: Sequence[Node], k: int) -> int:
    parent = nodes[k].parent
    return 0 if parent is None else 1 + depth(nodes, parent)


@given(size=st.integers(1, 70), root=st.integers(0))
def test_trees_reach_everybody_once_in_logarithmic_depth(size: int, root: int) -> None:
    root %= size
    first, second = double_binary(size)
    for nodes, levels in ((flat(size, root), 1), (binomial(size, root), log2(size)), (first, log2(size)),
                          (second, log2(size))):  # fmt: skip
        assert sum(node.parent is None for node in nodes) == 1
        assert sorted(c for node in nodes for c in node.children) == [
            k for k in range(size) if nodes[k].parent is not None
        ]
        assert all(nodes[c].parent == k for k in range(size) for c in nodes[k].children)
        assert max(depth(nodes, k) for k in range(size)) <= levels
    assert binomial(size, root)[root].parent is None


@given(size=st.integers(2, 70))
def test_an_inner_node_of_one_binary_tree_is_a_leaf_of_the_other(size: int) -> None:
    first, second = double_binary(size)
    for a, b in zip(first, second, strict=True):
        assert not (a.children and b.children)
        assert max(len(a.children), len(b.children)) <= 2


# -- auto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_auto_measures_once_and_all_members_choose_alike(run: Any, world: int) -> None:
    sizes = (1, 10_000, 300_000)

    def main(transport: Transport) -> tuple[LinkCosts, list[str]]:
        collective = joined(transport, Auto)
        assert isinstance(collective, Auto)
        for size in sizes:
            tensor = torch.full((size,), float(transport.rank))
            collective.all_reduce(tensor)
            assert (tensor == sum(range(world))).all()
        link = collective.link
        assert link is not None
        chosen, sent = [collective.choice(4 * size) for size in sizes], collective.bytes_sent
        collective.all_reduce(torch.zeros(1))
        assert collective.link is link
        assert collective.bytes_sent - sent <= 4 * 4  # nothing was measured again
        return link, chosen

    results = run(world, main)
    assert all(result == results[0] for result in results)
    link, chosen = results[0]
    assert min(link.alpha, link.gamma) > 0
    assert chosen == [cheapest(CANDIDATES, world, 4 * size, link) for size in sizes]


def test_auto_prefers_few_messages_for_small_tensors_and_few_bytes_for_large_ones() -> None:
    link = LinkCosts(50e-6, 1e-9, 0.2e-9)
    for world in (3, 4, 5, 8):
        small, large = (cheapest(CANDIDATES, world, nbytes, link) for nbytes in (64, 10**8))
        assert small == "recursive_doubling"
        assert large == ("ring" if world & (world - 1) else "halving_doubling")
        terms = {name: ALGORITHMS[name](world) for name in CANDIDATES}
        assert terms[small].messages == min(t.messages for t in terms.values())
        assert terms[large].traffic == min(t.traffic for t in terms.values())
