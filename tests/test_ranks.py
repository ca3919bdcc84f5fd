"""A rank's three numbers: of the world, of its replica, of its pipeline."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import engine
from engine.ranks import Rank, replica_ranks


def test_the_three_numbers_of_each_of_two_pipelines_of_three() -> None:
    found = [Rank.of(world, 3) for world in range(6)]
    assert found == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1), (5, 1, 2)]
    assert [Rank.at(rank.replica, rank.pipeline, 3) for rank in found] == found
    assert [list(replica_ranks(replica, 3)) for replica in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_arrays_elementwise() -> None:
    world, replica, pipeline = Rank.of(np.array([4, 0, 5]), 3)
    assert world.tolist() == [4, 0, 5] and replica.tolist() == [1, 0, 1] and pipeline.tolist() == [1, 0, 2]


@pytest.mark.parametrize("name", engine.__all__)
def test_no_module_takes_the_place_of_a_public_name(name: str) -> None:
    """`engine.rank()` is a function: an engine/rank.py would replace it as soon as anything imports that."""
    assert find_spec(f"engine.{name}") is None
