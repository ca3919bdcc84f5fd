"""The primitives: torch.distributed's semantics for any shape, dtype, subset and number of ranks; errors on all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from workers import HANG_S, RUNS, copy_late, over_threads, processes

from engine import collectives as ours
from engine.collectives import Group, ReduceOp, peers
from engine.transport import PeerTimeout, Transport

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
MOVED = [*DTYPES, torch.float8_e4m3fn]  # what can be moved, though not added
FOLDS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
worlds = st.integers(1, 8)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
ops = st.sampled_from(list(ReduceOp))
Main = Callable[[Group], Any]


def run(world: int, main: Main, members: Sequence[int] | None = None, how: Any = over_threads, **options: Any) -> Any:
    """`main(group)` on every member of a group; None from the other ranks."""

    def rank_main(transport: Transport) -> Any:
        chosen = list(range(world)) if members is None else list(members)
        transport.open(Group.edges(chosen, "g"))
        if transport.rank not in chosen:
            return None
        return main(Group(transport, chosen, "g", **options))

    return how(world, rank_main)


def part(shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
    """Small whole numbers, 1 .. 3: every operation on eight of them is exact in every dtype but the narrowest."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randint(1, 4, tuple(shape), generator=generator)
    return (numbers > 1) if dtype == torch.bool else numbers.to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same elements with gaps between them and the dimensions reversed."""
    spread = torch.zeros(*(2 * n for n in reversed(tensor.shape)), dtype=tensor.dtype)
    view = spread[tuple(slice(None, None, 2) for _ in tensor.shape)].permute(*reversed(range(tensor.dim())))
    view.copy_(tensor)
    return view


def combined(op: ReduceOp, tensors: Sequence[Tensor]) -> Tensor:
    """From the left, in double width."""
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) if t.is_floating_point() or t.is_complex()
            else t for t in tensors]  # fmt: skip
    total = wide[0].clone()
    for each in wide[1:]:
        total = FOLDS[op](total, each)
    return (total / len(tensors) if op is ReduceOp.MEAN else total).to(tensors[0].dtype)


# -- moving ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(world=worlds, shape=shapes, dtype=st.sampled_from(MOVED), root=st.integers(0), spread=st.booleans())
@pytest.mark.slow
def test_broadcast_scatter_and_gather(world: int, shape: Any, dtype: Any, root: int, spread: bool) -> None:
    src = root % world
    view = strided if spread and shape else Tensor.clone
    parts = [part(shape, torch.float32, rank).to(dtype) for rank in range(world)]

    def main(group: Group) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        mine = view(parts[group.rank])
        ours.broadcast(mine, src, group=group)
        scattered, lists = view(torch.zeros_like(parts[0])), [view(p) for p in parts]
        ours.scatter(scattered, lists if group.rank == src else None, src, group=group)
        gathered = [view(torch.zeros_like(p)) for p in parts] if group.rank == src else None
        ours.gather(view(parts[group.rank]), gathered, src, group=group)
        return mine, scattered, gathered

    for rank, (sent, scattered, gathered) in enumerate(run(world, main)):
        assert bits(sent) == bits(parts[src])
        assert bits(scattered) == bits(parts[rank])
        assert (gathered is None) == (rank != src)
        assert gathered is None or [bits(g) for g in gathered] == [bits(p) for p in parts]


def bits(tensor: Tensor) -> list[int]:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()


@settings(max_examples=60)
@given(world=worlds, shape=shapes, dtype=st.sampled_from(MOVED), spread=st.booleans())
@pytest.mark.slow
def test_all_gather_into_lists_and_tensors(world: int, shape: Any, dtype: Any, spread: bool) -> None:
    view = strided if spread and shape else Tensor.clone
    parts = [part(shape, torch.float32, rank).to(dtype) for rank in range(world)]
    uneven = [part((rank,), torch.float32, rank).to(dtype) for rank in range(world)]

    def main(group: Group) -> tuple[list[Tensor], list[Tensor], Tensor]:
        into = [view(torch.zeros_like(p)) for p in parts]
        ours.all_gather(into, view(parts[group.rank]), group=group)
        other = [torch.zeros_like(p) for p in uneven]
        ours.all_gather(other, uneven[group.rank], group=group)
        stacked = torch.zeros(world, *shape).to(dtype)
        ours.all_gather_into_tensor(stacked, view(parts[group.rank]), group=group)
        return into, other, stacked

    for into, other, stacked in run(world, main):
        assert [bits(t) for t in into] == [bits(p) for p in parts]
        assert [bits(t) for t in other] == [bits(p) for p in uneven]
        assert bits(stacked) == bits(torch.stack(parts))


@settings(max_examples=60)
@given(world=worlds, dtype=st.sampled_from(MOVED), seed=st.integers(0, 2**32))
@pytest.mark.slow
def test_all_to_all_transposes(world: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 4, (world, world), generator=generator).tolist()
    table = [[part((n, 2), torch.float32, 9 * a + b).to(dtype) for b, n in enumerate(row)]
             for a, row in enumerate(sizes)]  # fmt: skip

    def main(group: Group) -> tuple[list[Tensor], Tensor, Tensor]:
        me = group.rank
        into = [torch.zeros_like(table[k][me]) for k in range(world)]
        ours.all_to_all(into, table[me], group=group)
        whole = torch.zeros(sum(len(t) for t in into), 2).to(dtype)
        splits = [len(t) for t in into], [len(t) for t in table[me]]
        ours.all_to_all_single(whole, cat(table[me]), *splits, group=group)
        even = torch.zeros(2 * world)
        ours.all_to_all_single(even, torch.arange(2.0 * world) + 100 * me, group=group)
        return into, whole, even

    for me, (into, whole, even) in enumerate(run(world, main)):
        column = [table[k][me] for k in range(world)]
        assert [bits(t) for t in into] == [bits(t) for t in column]
        assert bits(whole) == bits(cat(column))
        assert even.tolist() == [100.0 * k + 2 * me + i for k in range(world) for i in (0, 1)]


def cat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)


# -- combining -------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(world=worlds, shape=shapes, dtype=st.sampled_from(DTYPES), op=ops, root=st.integers(0), spread=st.booleans())
@pytest.mark.slow
def test_reductions(world: int, shape: Any, dtype: Any, op: ReduceOp, root: int, spread: bool) -> None:
    if op.refusal(dtype):
        return
    dst = root % world
    view = strided if spread and shape else Tensor.clone
    parts = [part(shape, dtype, rank) for rank in range(world)]

    def main(group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mine, everywhere = view(parts[group.rank]), view(parts[group.rank])
        ours.reduce(mine, dst, op, group=group)
        ours.all_reduce(everywhere, op, group=group)
        shard, row = view(torch.zeros_like(parts[0])), view(torch.zeros_like(parts[0]))
        ours.reduce_scatter(shard, [view(parts[(group.rank + k) % world]) for k in range(world)], op, group=group)
        stacked = torch.stack([parts[(group.rank + k) % world] for k in range(world)])
        ours.reduce_scatter_tensor(row, stacked, op, group=group)
        return mine, everywhere, shard, row

    expected, results = combined(op, parts), run(world, main)
    for rank, (mine, everywhere, *shards) in enumerate(results):
        assert bits(everywhere) == bits(results[0][1])
        for each in (everywhere, *shards, *([mine] if rank == dst else [])):
            torch.testing.assert_close(each, expected)  # exact for whole numbers
        assert rank == dst or torch.equal(mine, parts[rank])


@given(world=st.integers(2, 8), size=st.integers(0, 60), dtype=st.sampled_from([torch.float32, torch.float64]))
@pytest.mark.slow
def test_reduce_scatter_and_all_gather_give_the_rings_bits(world: int, size: int, dtype: torch.dtype) -> None:
    parts = torch.randn(world, size, dtype=dtype, generator=torch.Generator().manual_seed(size)) ** 3

    def main(group: Group) -> tuple[Tensor, Tensor]:
        mine = parts[group.rank].clone()
        ours.all_reduce(mine, group=group)
        chunks = list(parts[group.rank].tensor_split(world))
        shard = torch.empty_like(chunks[group.position])
        ours.reduce_scatter(shard, chunks, group=group)
        ours.all_gather(chunks, shard, group=group)
        return mine, torch.cat(chunks)

    results = run(world, main)
    assert all(torch.equal(a, b) and torch.equal(a, results[0][0]) for a, b in results)


def test_half_precision_is_combined_in_fp32_and_rounded_once() -> None:
    """2048 + 1 + 1 + 1 in fp16 steps stays 2048; in fp32 it is 2051, which rounds to 2052."""
    values = [2048.0, 1.0, 1.0, 1.0]

    def main(group: Group) -> tuple[float, float]:
        shard, mean = torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)
        mine = torch.full((4, 1), values[group.rank], dtype=torch.float16)
        ours.reduce_scatter(shard, list(mine), group=group)
        large = torch.full((4,), 60000.0, dtype=torch.float16)
        ours.reduce_scatter_tensor(mean, large, ReduceOp.MEAN, group=group)
        ours.all_reduce(large, ReduceOp.MEAN, group=group)
        assert large.tolist() == [60000.0] * 4  # the sum would be infinite
        return float(shard), float(mean)

    assert run(4, main) == [(2052.0, 60000.0)] * 4


def test_what_has_no_result_is_refused_by_name() -> None:
    cases: list[tuple[Tensor, ReduceOp, str]] = [
        (torch.zeros(2, dtype=torch.int32), ReduceOp.MEAN, "no mean of torch.int32 is defined; use one of"),
        (torch.zeros(2) > 0, ReduceOp.SUM, "no sum of torch.bool"),
        (torch.zeros(2, dtype=torch.complex64), ReduceOp.MAX, "no max of torch.complex64"),
        (torch.zeros(2).to(torch.float8_e5m2), ReduceOp.PRODUCT, "no product of torch.float8_e5m2"),
    ]
    for tensor, op, words in cases:
        for call in (ours.all_reduce, lambda t, o, group: ours.reduce(t, 0, o, group=group)):
            with pytest.raises(ValueError, match=words):
                run(2, lambda group, c=call, t=tensor, o=op: c(t, o, group=group))


# -- groups ----------------------------------------------------------------------------------------------------------


def test_members_are_any_ranks_in_any_order() -> None:
    def main(group: Group) -> tuple[float, list[float]]:
        value, values = torch.tensor([float(group.rank)]), [torch.zeros(1) for _ in range(3)]
        ours.all_gather(values, value, group=group)
        ours.broadcast(value, 4, group=group)
        return float(value), [float(v) for v in values]

    assert run(6, main, members=[5, 1, 4]) == [None, (4.0, [5, 1, 4]), None, None, (4.0, [5, 1, 4]), (4.0, [5, 1, 4])]


def test_who_is_no_member_is_told_so() -> None:
    def main(transport: Transport) -> None:
        transport.open(Group.edges([0, 1], "g"))
        if transport.rank == 2:
            Group(transport, [0, 1], "g")

    with pytest.raises(ValueError, match=r"group g: rank 2 is none of its members \[0, 1\]"):
        over_threads(3, main)


def test_a_barrier_waits_for_everybody() -> None:
    arrived: list[int] = []

    def main(group: Group) -> int:
        time.sleep(0.02 * group.rank)
        arrived.append(group.rank)
        ours.barrier(group=group)
        return len(arrived)

    assert run(4, main) == [4] * 4


@given(world=st.integers(2, 8), size=st.integers(0, 40))
@pytest.mark.slow
def test_bytes_are_those_of_the_formulas(world: int, size: int) -> None:
    """Without tickets. n: the whole tensor, N: the ranks."""

    def main(group: Group) -> dict[str, int]:
        n = 4 * world * size  # bytes of the whole
        whole, piece = torch.ones(world * size), torch.ones(size)
        sent: dict[str, int] = {}

        def count(what: str, call: Callable[[], None]) -> None:
            before = group.bytes_sent
            call()
            sent[what] = group.bytes_sent - before

        count("all_gather", lambda: ours.all_gather_into_tensor(whole, piece, group=group))
        count("reduce_scatter", lambda: ours.reduce_scatter_tensor(piece, whole, group=group))
        count("all_to_all", lambda: ours.all_to_all_single(torch.ones(world * size), whole, group=group))
        assert set(sent.values()) == {(world - 1) * n // world}
        count("broadcast", lambda: ours.broadcast(whole, 0, group=group))
        count("reduce", lambda: ours.reduce(whole, 0, group=group))
        count("gather", lambda: ours.gather(piece, list(torch.ones(world, size)) if group.rank == 0 else None,
                                            group=group))  # fmt: skip
        return {what: 4 * nbytes // max(1, n) for what, nbytes in sent.items()} | {"gather": sent["gather"]}

    results = run(world, main, checked=False)
    if size:
        depth = (world - 1).bit_length()
        assert results[0]["broadcast"] == 4 * depth and results[0]["reduce"] == 0
        assert sum(r["broadcast"] for r in results) == sum(r["reduce"] for r in results) == 4 * (world - 1)
        assert [r["gather"] for r in results] == [0] + [4 * size] * (world - 1)


def test_a_ticket_is_all_that_checking_costs() -> None:
    def main(group: Group) -> tuple[int, int]:
        ours.broadcast(torch.zeros(3), 0, group=group)
        return group.messages_sent, group.bytes_sent

    plain = run(4, main, checked=False)
    checked = run(4, main)
    assert [(c[0] - p[0], c[1] - p[1]) for c, p in zip(checked, plain, strict=True)] == [(3, 3 * 256)] * 4


# -- disagreement ----------------------------------------------------------------------------------------------------


def on_all(world: int, main: Main, how: Any = over_threads) -> list[str]:
    """The ValueError of each rank; afterwards the group still works."""

    def caught(group: Group) -> str:
        with pytest.raises(ValueError, match=r"^g: ") as error:
            main(group)
        total = torch.ones(2)
        ours.all_reduce(total, group=group)
        assert total.tolist() == [world, world]
        return str(error.value)

    return run(world, caught, how=how)


Call = Callable[[Group], None]
CALLS: dict[str, tuple[Call, Call]] = {
    "shape": (lambda g: ours.all_reduce(torch.zeros(3), group=g), lambda g: ours.all_reduce(torch.zeros(4), group=g)),
    "equal sizes": (
        lambda g: ours.all_reduce(torch.zeros(2, 3), group=g),
        lambda g: ours.all_reduce(torch.zeros(3, 2), group=g),
    ),
    "dtype": (
        lambda g: ours.broadcast(torch.zeros(2), 0, group=g),
        lambda g: ours.broadcast(torch.zeros(2, dtype=torch.int32), 0, group=g),
    ),
    "operation": (
        lambda g: ours.all_reduce(torch.zeros(3), group=g),
        lambda g: ours.all_reduce(torch.zeros(3), ReduceOp.MAX, group=g),
    ),
    "source": (
        lambda g: ours.broadcast(torch.zeros(3), 0, group=g),
        lambda g: ours.broadcast(torch.zeros(3), 1, group=g),
    ),
    "call": (lambda g: ours.barrier(group=g), lambda g: ours.reduce(torch.zeros(3), 0, group=g)),
}


@pytest.mark.parametrize("how", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("what", CALLS)
def test_a_disagreement_is_one_error_on_all_ranks(what: str, how: Any) -> None:
    usual, other = CALLS[what]
    said = on_all(3, lambda group: (other if group.rank == 1 else usual)(group), how)
    assert len(set(said)) == 1
    assert "the members call differently: rank(s) 0, 2: " in said[0] and "; rank(s) 1: " in said[0]


def test_one_ranks_own_mistake_is_told_to_all() -> None:
    mistakes: list[tuple[Call, str]] = [
        (lambda g: ours.all_gather([torch.zeros(1)], torch.zeros(1), group=g), "tensor_list needs 3 tensors"),
        (lambda g: ours.broadcast(torch.zeros(1), 7, group=g), "src=7 is none of the members"),
        (lambda g: ours.all_gather_into_tensor(torch.zeros(4), torch.zeros(2), group=g), "3 times the elements"),
        (lambda g: ours.scatter(torch.zeros(1), [torch.zeros(1)], 0, group=g), "only the source gives"),
        (lambda g: ours.gather(torch.zeros(1), [torch.zeros(1)], 0, group=g), "only the destination gives"),
        (lambda g: ours.all_to_all_single(torch.zeros(4), torch.zeros(3), group=g), "output has 4 rows"),
        (lambda g: ours.all_reduce(torch.zeros(1) > 0, group=g), "no sum of torch.bool"),
    ]
    for wrong, words in mistakes:
        said = on_all(3, lambda g, w=wrong: w(g) if g.rank == 2 else ours.all_reduce(torch.zeros(9), group=g))
        assert set(said) == {said[0]}
        assert said[0].startswith("g: rank(s) 2: ") and words in said[0]


def test_all_to_all_compares_what_only_a_pair_knows() -> None:
    def main(group: Group) -> None:
        outputs = [torch.zeros(2 if (group.rank, k) == (2, 0) else 1) for k in range(3)]
        ours.all_to_all(outputs, list(torch.zeros(3, 1)), group=group)

    assert set(on_all(3, main)) == {"g: all_to_all: rank 0 sends 1 elements to rank 2, which expects 2"}


def test_long_calls_differ_in_what_is_not_shown() -> None:
    def main(group: Group) -> None:
        shapes = [*([1] * 150), 2 if group.rank else 1]
        ours.all_reduce(torch.zeros(shapes), group=group)

    (said,) = set(on_all(2, main))
    assert "call differently: rank(s) 0: all_reduce of [1, 1, " in said


@pytest.mark.parametrize("how", RUNS.values(), ids=RUNS)
@pytest.mark.slow
def test_who_stays_away_is_named(how: Any) -> None:
    def main(transport: Transport) -> str | None:
        transport.open(Group.edges([0, 1, 2], "g"))
        group = Group(transport, [0, 1, 2], "g")
        if group.rank == 1:
            time.sleep(1.0)
            return None
        with pytest.raises(PeerTimeout) as error:
            ours.all_reduce(torch.zeros(5), group=group)
        return str(error.value)

    first, none, last = how(3, main, timeout_s=0.4)
    assert none is None
    for said in (first, last):
        assert said.startswith("g: all_reduce of [5] float32, sum, by ring: rank(s) 0, 2 came, 1 did not for 0.")


# -- the real thing --------------------------------------------------------------------------------------------------


def calls(rank: int, world: int, api: Any, **group: Any) -> list[list[float]]:
    """The same calls of ours or of torch's; whole numbers, so that no order of additions shows."""
    x, kind = part((world, 4), torch.float64, rank), (ReduceOp if api is ours else dist.ReduceOp)
    out: list[Tensor] = []
    for op in (kind.SUM, kind.MIN, kind.MAX, kind.PRODUCT):
        y, z = x.clone(), x.clone()
        api.all_reduce(y, op, **group)
        api.reduce(z, 1, op, **group)
        out += [y, *([z] if rank == 1 else [])]
    y, piece, shard, row = x.clone(), x[0].clone(), x[0].clone(), x[:1].clone()
    gathered, lists = ([torch.zeros_like(x) for _ in range(world)] for _ in range(2))
    whole, single = torch.zeros(world * world, 4, dtype=x.dtype), torch.zeros_like(x)
    api.broadcast(y, 2, **group)
    api.scatter(piece, list(x.clone()) if rank == 1 else None, 1, **group)
    api.gather(x.clone(), gathered if rank == 0 else None, 0, **group)
    api.all_gather(lists, x.clone(), **group)
    api.all_gather_into_tensor(whole, x.clone(), **group)
    api.reduce_scatter(shard, list(x.clone()), kind.SUM, **group)
    api.reduce_scatter_tensor(row, x.clone(), kind.SUM, **group)
    api.all_to_all_single(single, x.clone(), **group)
    api.barrier(**group)
    return [t.flatten().tolist() for t in [*out, y, piece, *gathered, *lists, whole, shard, row, single]]


@pytest.mark.parametrize("world", [3, 5])
def test_memory_that_is_still_being_sent_or_received_is_left_alone(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(group: Group) -> list[list[float]]:
        return calls(group.rank, world, ours, group=group)

    expected = run(world, main)
    copy_late(monkeypatch, seed=world)
    monkeypatch.setattr(peers, "PIECE_BYTES", 16)
    assert run(world, main, checked=False) == expected


def both(transport: Transport, pipe: Any) -> None:
    """In a process: all calls in both ways."""
    rank, world = transport.rank, transport.world
    transport.open(Group.edges(range(world), "g"))
    mine = calls(rank, world, ours, group=Group(transport, range(world), "g"))
    dist.init_process_group("gloo", init_method=f"file://{pipe.recv()}", rank=rank, world_size=world)
    pipe.send((mine, calls(rank, world, dist)))
    dist.destroy_process_group()
    transport.close()


@pytest.mark.process
@pytest.mark.slow
def test_equal_to_torch_distributed_over_gloo(tmp_path: Path) -> None:
    with processes(3, both, timeout_s=30) as started:
        for _, pipe in started:
            pipe.send(str(tmp_path / "store"))
        for _, pipe in started:
            assert pipe.poll(HANG_S)
            mine, theirs = pipe.recv()
            assert mine == theirs
