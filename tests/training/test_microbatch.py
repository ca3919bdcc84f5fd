"""Splitting: sizes, shares, passes, and what may be split."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.pipeline.batches.microbatch import passes, sizes, take
from engine.training.samples.batches import Batches


@given(st.integers(0, 300), st.integers(1, 40))
def test_sizes_are_even_and_complete(total: int, parts: int) -> None:
    found = sizes(total, parts)
    assert len(found) == parts
    assert sum(found) == total
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


def test_sizes_of_the_published_cases() -> None:
    assert sizes(6, 4) == [2, 2, 1, 1]
    assert sizes(9, 4) == [3, 2, 2, 2]
    assert sizes(5, 4) == [2, 1, 1, 1]


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 9))
def test_passes_lose_no_sample_and_hold_no_empty_piece(share: int, accumulate: int, microbatches: int) -> None:
    found = passes(share, accumulate, microbatches, lambda m: m)
    rows = [rows for piece in found for rows in piece]
    assert sum(rows) == share
    assert all(n > 0 for n in rows)
    assert len(found) <= accumulate
    assert all(len(piece) <= microbatches for piece in found)
    assert (found == []) == (share == 0)


def test_passes_keep_to_what_is_legal() -> None:
    assert passes(7, 1, 6, lambda m: m // 4 * 4) == [[2, 2, 2, 1]]


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 5), st.booleans())
def test_replicas_partition_every_epoch(samples: int, global_size: int, replicas: int, shuffle: bool) -> None:
    """Shards partition the set in every epoch; a batch that leaves a replica without samples is passed over."""
    batches = Batches(samples, global_size, replicas, seed=3, shuffle=shuffle)
    count = 2 * batches.per_epoch
    drawn = [list(batches.shares(replica, count)) for replica in range(replicas)]
    for index in range(count):
        shares = sizes(batches.count(index), replicas)
        expected = batches.order(index // batches.per_epoch).tolist()
        at = index % batches.per_epoch * global_size
        got = [drawn[r].pop(0) for r in range(replicas) if shares[r]]
        assert [i for share in got for i in share] == expected[at : at + batches.count(index)]
    assert not any(drawn)
    for epoch in range(2):
        assert sorted(batches.order(epoch).tolist()) == list(range(samples))


def test_epochs_are_reshuffled_and_reproducible() -> None:
    batches = Batches(50, 10, 1, seed=5, shuffle=True)
    orders = [batches.order(epoch).tolist() for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders == [Batches(50, 7, 2, seed=5, shuffle=True).order(epoch).tolist() for epoch in range(3)]
    assert Batches(50, 10, 1, seed=6, shuffle=True).order(0).tolist() != orders[0]
    assert Batches(50, 10, 1, seed=5, shuffle=False).order(4).tolist() == list(range(50))


def test_steps_are_counted_once_for_everybody() -> None:
    batches = Batches(100, 24, 3, seed=0, shuffle=True)
    assert batches.per_epoch == 5
    assert [batches.count(i) for i in range(6)] == [24, 24, 24, 24, 4, 24]
    assert batches.steps(None, 2) == 10
    assert batches.steps(13, None) == 13


class Pair(NamedTuple):
    a: object
    b: object


def test_take_splits_structures() -> None:
    batch = (
        torch.arange(9),
        list("abcdefghi"),
        {"x": torch.arange(18).view(9, 2), "n": None},
        3,
        Pair(torch.arange(9), "s"),
    )
    numbers, letters, nested, scalar, pair = take(batch, 3, 2, 9)
    assert numbers.tolist() == [3, 4]
    assert letters == ["d", "e"]
    assert nested["x"].tolist() == [[6, 7], [8, 9]]
    assert nested["n"] is None
    assert scalar == 3
    assert isinstance(pair, Pair)
    assert pair.a.tolist() == [3, 4]


def test_take_gives_tensors_of_their_own() -> None:
    batch = torch.zeros(4)
    take(batch, 0, 2, 4).add_(1)
    assert batch.tolist() == [0, 0, 0, 0]


def test_take_names_what_it_cannot_split() -> None:
    with pytest.raises(ValueError, match=r"holds an object at batch\[1\], which cannot be split"):
        take((torch.zeros(2), object()), 0, 1, 2)
    with pytest.raises(ValueError, match=r"of shape \(3, 2\): dim 0 differs"):
        take(torch.zeros(3, 2), 0, 1, 2)
    with pytest.raises(ValueError, match=r"of shape \(3,\) at batch\[0\]\['x'\]\[1\]: dim 0 differs"):
        take(({"x": [torch.zeros(2), torch.zeros(3)]}, 1), 0, 1, 2)
