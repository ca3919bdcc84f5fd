"""Layers become stages: contiguous, none empty, the largest as small as can be."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.partition import manual, partition

costs_and_stages = st.lists(st.floats(0, 100), min_size=1, max_size=8).flatmap(
    lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
)


def sizes(split: tuple[int, ...], layers: int) -> list[int]:
    return [b - a for a, b in itertools.pairwise((*split, layers))]


def loads(split: tuple[int, ...], costs: list[float]) -> list[float]:
    return [sum(costs[a:b]) for a, b in itertools.pairwise((*split, len(costs)))]


@pytest.mark.parametrize("cost", [1, 0, 0.1, 1e9 / 3])
@pytest.mark.slow(keep=3)
def test_equal_layers_are_shared_evenly(cost):
    """C073: all (L, P) with 1 <= P <= L <= 40."""
    for layers in range(1, 41):
        for stages in range(1, layers + 1):
            split = partition([cost] * layers, stages)
            assert split[0] == 0
            assert len(split) == stages
            shares = sizes(split, layers)
            assert sum(shares) == layers
            assert min(shares) >= 1
            assert max(shares) - min(shares) <= 1


@given(costs_and_stages)
def test_no_partition_has_a_smaller_largest_stage(case):
    costs, stages = case
    split = partition(costs, stages)
    assert list(split) == sorted(set(split))
    assert split[0] == 0
    assert split[-1] < len(costs)
    assert len(split) == stages
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(max(loads((0, *cuts), costs)) for cuts in every)
    assert max(loads(split, costs)) == pytest.approx(best)


def test_among_equals_the_rest_is_even_too():
    """The 9 decides the largest stage; the other layers are shared all the same."""
    assert loads(partition([9, 1, 1, 1, 1, 1, 1], 3), [9, 1, 1, 1, 1, 1, 1]) == [9, 3, 3]


def test_resnet50_in_two_by_parameters():
    """stem, layer1..4, fc: what the last block and the head hold outweighs all before them."""
    assert partition([9_536, 215_808, 1_219_584, 7_098_368, 14_964_736, 2_049_000], 2) == (0, 4)


def test_more_stages_than_layers_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"5 stages need 5 layers .* model has 3.*lower pipeline.ranks"):
        partition([1, 1, 1], 5)


@pytest.mark.parametrize("stages", [0, -1])
def test_no_stages_are_refused(stages):
    with pytest.raises(ValueError, match="1 or more"):
        partition([1, 2], stages)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_impossible_costs_are_refused(cost):
    with pytest.raises(ValueError, match="a layer cannot cost"):
        partition([1.0, cost], 1)


NAMES = ["stem.conv", "stem.bn", "layer1.0", "layer1.1", "layer10.0", "layer2", "head"]


@pytest.mark.parametrize(
    ("split", "starts"),
    [
        ([], (0,)),
        (["layer1"], (0, 2)),
        (["layer10"], (0, 4)),
        (["layer1.1", "layer2", "head"], (0, 3, 5, 6)),
        (["stem.bn", "layer1"], (0, 1, 2)),
    ],
)
def test_a_name_begins_a_stage_at_the_first_layer_it_matches(split, starts):
    assert manual(NAMES, split) == starts
    assert manual(NAMES, split, stages=len(starts)) == starts


@pytest.mark.parametrize(
    ("split", "complaint"),
    [
        (["layer3"], r"no layer 'layer3'; did you mean 'layer2' or .*the layers are: stem\.conv, stem\.bn"),
        (["xyz"], r"no layer 'xyz'; the layers are: stem"),
        (["layer"], r"no layer 'layer';"),
        (["layer2", "layer1"], r"'layer1' comes before 'layer2'"),
        (["layer1", "layer1"], r"'layer1' and 'layer1' begin at the same layer, 'layer1.0'"),
        (["layer1", "layer1.0"], r"'layer1.0' and 'layer1' begin at the same layer"),
        (["stem"], r"'stem' is the first layer"),
        (["layer1", "stem.conv"], r"'stem.conv' is the first layer"),
        ([3], r"no layer 3; the layers are"),
    ],
)
def test_wrong_splits_are_refused(split, complaint):
    with pytest.raises(ValueError, match=complaint):
        manual(NAMES, split)


def test_a_split_must_give_the_stages_asked_for():
    with pytest.raises(
        ValueError, match=r"names 1 layers, which makes 2 stages, and the pipeline has 4: name 3 layers"
    ):
        manual(NAMES, ["head"], stages=4)


def test_models_with_many_layers_are_not_listed_in_full():
    with pytest.raises(ValueError, match=r"layer39, \.\.\.$"):
        manual([f"layer{i}" for i in range(100)], ["nothing"])
