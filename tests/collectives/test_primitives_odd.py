"""The primitives where a caller is unusual: in inference mode, with another library's operation, with sizes that are
no numbers, in a group that names a rank twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_primitives import run
from torch import Tensor
from workers import RUNS, over_threads

from engine import collectives as ours
from engine.collectives import Group, ReduceOp
from engine.transport import Transport

Make = Callable[[int], Tensor]


def everything(group: Group, make: Make) -> list[Any]:
    """What each primitive leaves in tensors of so many elements from `make`; 1 is the root."""
    n, root = group.size, group.rank == 1
    all_reduced, copied, reduced = make(5), make(5), make(5)
    ours.all_reduce(all_reduced, group=group)
    ours.broadcast(copied, 1, group=group)
    ours.reduce(reduced, 1, ReduceOp.MEAN, group=group)
    gathered, all_gathered, scattered = [make(2) for _ in range(n)], [make(2) for _ in range(n)], make(2)
    ours.gather(make(2), gathered if root else None, 1, group=group)
    ours.all_gather(all_gathered, make(2), group=group)
    ours.scatter(scattered, [make(2) for _ in range(n)] if root else None, 1, group=group)
    whole, part, exchanged = make(2 * n), make(3), make(n)
    ours.all_gather_into_tensor(whole, make(2), group=group)
    ours.reduce_scatter_tensor(part, make(3 * n), group=group)
    ours.all_to_all_single(exchanged, make(n), group=group)
    ours.barrier(group=group)
    single = [all_reduced, copied, reduced, scattered, whole, part, exchanged]
    return [each.tolist() for each in [*single, *gathered, *all_gathered]]


@pytest.mark.parametrize("how", RUNS)
def test_tensors_of_inference_mode_are_taken_inside_and_outside_of_it(how: str) -> None:
    """An evaluation's figures, say. What a call made in that mode keeps for the next must not spoil one outside."""

    def main(group: Group) -> tuple[list[Any], list[list[Any]]]:
        def make(elements: int, there: bool) -> Tensor:
            with torch.inference_mode() if there else nullcontext():
                return torch.arange(1.0, elements + 1) * (group.rank + 1)

        found = []
        for inside, there in ((True, True), (False, False), (False, True), (True, False)):
            with torch.inference_mode() if inside else nullcontext():
                found.append(everything(group, lambda elements, there=there: make(elements, there)))  # type: ignore[misc]
        return everything(group, lambda elements: make(elements, False)), found

    for expected, found in run(3, main, how=RUNS[how]):
        assert found == [expected] * 4
        assert expected[0] == [6.0, 12.0, 18.0, 24.0, 30.0]  # (1 + 2 + 3) times 1, 2, 3, ...


@pytest.mark.parametrize("alone", [False, True], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, "sum", None])
@pytest.mark.parametrize(
    "call",
    [
        lambda op, group: ours.all_reduce(torch.ones(2), op, group=group),
        lambda op, group: ours.reduce(torch.ones(2), 0, op, group=group),
        lambda op, group: ours.reduce_scatter(torch.ones(1), [torch.ones(1)] * 2, op, group=group),
        lambda op, group: ours.reduce_scatter_tensor(torch.ones(1), torch.ones(2), op, group=group),
    ],
    ids=["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"],
)
def test_an_operation_of_another_kind_is_refused_on_all_ranks(call: Any, op: Any, alone: bool) -> None:
    def main(group: Group) -> str:
        with pytest.raises(ValueError) as refused:
            call(ReduceOp.SUM if alone and group.rank else op, group)
        return str(refused.value)

    first, second = run(2, main)
    ranks = "0" if alone else "0, 1"
    assert first == second
    assert first.startswith(f"g: rank(s) {ranks}: op={op!r} is none of engine.collectives' ReduceOp.SUM, ReduceOp.MEAN")


@pytest.mark.parametrize("sizes", [[1.5, 1.5, 3], [1, 2], [-1, 3, 4], ["1", 2, 3], [1, 2, 4]])
def test_split_sizes_that_do_not_split_are_an_error_on_all_ranks(sizes: Any) -> None:
    def main(group: Group) -> str:
        given = sizes if group.rank == 1 else None
        with pytest.raises(ValueError) as refused:
            ours.all_to_all_single(torch.zeros(6), torch.zeros(6), None, given, group=group)
        return str(refused.value)

    said = f"g: rank(s) 1: input_split_sizes={sizes} must be 3 whole numbers that add up to 6"
    assert run(3, main) == [said] * 3


def test_a_group_names_each_rank_once() -> None:
    def main(transport: Transport) -> None:
        with pytest.raises(ValueError, match=r"group g: its members \[0, 1, 0\] name a rank twice"):
            Group(transport, [0, 1, 0], "g")

    over_threads(2, main)


@pytest.mark.parametrize("how", RUNS)
def test_what_is_received_may_lie_where_something_is_sent_from(how: str) -> None:
    """In place, and one buffer for both: as if everything had been copied before."""

    def main(group: Group) -> list[list[float]]:
        own, n = group.rank, group.size
        sent = torch.arange(float(n)) + 10 * own
        exchanged, shifted = sent.clone(), torch.cat([sent, torch.zeros(1)])
        ours.all_to_all_single(exchanged, exchanged, group=group)
        ours.all_to_all_single(shifted[1:], shifted[:-1], group=group)
        gathered, first = torch.zeros(n), torch.zeros(n)
        gathered[own], first[0] = own, own
        ours.all_gather_into_tensor(gathered, gathered[own : own + 1], group=group)
        ours.all_gather_into_tensor(first, first[:1], group=group)
        parts, rooted, spread = torch.full((n,), float(own)), torch.full((n,), float(own)), torch.arange(float(n))
        ours.all_gather(list(parts.chunk(n)), parts[n - 1 :], group=group)
        ours.gather(rooted[:1], list(rooted.chunk(n)) if own == 1 else None, 1, group=group)
        ours.scatter(spread[2:3], list(spread.chunk(n)) if own == 1 else None, 1, group=group)
        summed = sent.clone()
        ours.reduce_scatter_tensor(summed[:1], summed, group=group)
        mine = [
            exchanged,
            shifted[1:],
            gathered,
            first,
            parts,
            rooted if own == 1 else gathered,
            spread[2:3],
            summed[:1],
        ]
        return [each.tolist() for each in mine]

    for rank, found in enumerate(run(3, main, how=RUNS[how])):
        column, ranks = [0.0 + rank, 10.0 + rank, 20.0 + rank], [0.0, 1.0, 2.0]
        assert found == [column, column, ranks, ranks, ranks, ranks, [float(rank)], [30.0 + 3 * rank]]


def test_a_number_cannot_be_split() -> None:
    def main(group: Group) -> str:
        one = torch.tensor(1.0) if group.rank else torch.zeros(2)
        with pytest.raises(ValueError) as refused:
            ours.all_to_all_single(torch.zeros(2), one, group=group)
        return str(refused.value)

    assert run(2, main) == ["g: rank(s) 1: input is [] float32: it has no dimension to be cut along"] * 2
