"""The cost model: published forms, the textbook example, and that it counts what the algorithms send."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_algorithms import OURS, numbers, reduced, traffic

from engine.collectives import COLLECTIVES
from engine.collectives.allreduce.costs import (
    ALGORITHMS,
    LinkCosts,
    Terms,
    example_seconds,
    hierarchical,
    parameter_server,
    reduce_broadcast_at_once,
    ring,
    sharded_parameter_server,
)
from engine.collectives.guide import guide

LINK = LinkCosts(alpha=3e-5, beta=1.1e-9, gamma=1.7e-10)
POWERS = [2, 4, 8, 16, 64]


def test_the_textbook_example_takes_60_80_and_15_ms() -> None:
    """160 MB of gradients, four GPUs, links of 16 GB/s."""
    milliseconds = {way: seconds * 1e3 for way, seconds in example_seconds().items()}
    assert milliseconds == pytest.approx(
        {"one GPU as server": 60, "the host as server": 80, "a shard on every GPU": 15}
    )


@pytest.mark.parametrize("size", POWERS)
@pytest.mark.parametrize("n", [64, 10**6, 10**9])
def test_published_forms(size: int, n: float) -> None:
    a, b, c = LINK
    log = math.log2(size)
    forms = {
        "ring": 2 * (size - 1) * a + 2 * (size - 1) / size * n * b + (size - 1) / size * n * c,
        "tree": log * (2 * a + 2 * n * b + n * c),
        "reduce_broadcast": 2 * (size - 1) * (a + n * b) + (size - 1) * n * c,
        "recursive_doubling": log * (a + n * b + n * c),
        "halving_doubling": 2 * log * a + 2 * (size - 1) / size * n * b + (size - 1) / size * n * c,
    }
    for name, seconds in forms.items():
        assert ALGORITHMS[name](size).seconds(n, LINK) == pytest.approx(seconds)
    if size > 2:
        got = ALGORITHMS["double_ring"](size).seconds(n, LINK._replace(gamma=0.0))
        assert got == pytest.approx(2 * (size - 1) * a + (size - 1) / size * n * b)
    assert parameter_server(size).seconds(n, LINK._replace(gamma=0)) == pytest.approx(2 * size * (a + n * b))


@given(st.integers(1, 8), st.integers(1, 8), st.floats(1, 1e9))
def test_hierarchical_is_a_ring_inside_and_a_smaller_one_between(g: int, m: int, n: float) -> None:
    inside, between = hierarchical(g, m)
    a, b = 1e-5, 1e-9
    slow, fast = LinkCosts(a, b, 0.0), LinkCosts(a / 10, b / 10, 0.0)
    want = 2 * (g - 1) * a / 10 + 2 * (g - 1) / g * n * b / 10 + 2 * (m - 1) * a + 2 * (m - 1) / m * (n / g) * b
    assert inside.seconds(n, fast) + between.seconds(n, slow) == pytest.approx(want)


@pytest.mark.parametrize("size", range(2, 9))
def test_a_shard_on_every_worker_moves_as_much_as_a_ring(size: int) -> None:
    assert sharded_parameter_server(size).traffic == ring(size).traffic


@pytest.mark.parametrize("name", sorted(set(OURS) & set(ALGORITHMS)))
@pytest.mark.parametrize("size", range(2, 9))
def test_the_model_knows_what_the_busiest_rank_sends(name: str, size: int) -> None:
    """Traffic of the formula against bytes that were counted, where one rank's bytes are on the longest path."""
    counted = (
        max(nbytes for _, nbytes, _ in reduced(size, COLLECTIVES[name], numbers(size, 1680, torch.float32))) / 6720
    )
    terms = ALGORITHMS[name](size)
    if name == "double_ring" and size > 2:
        assert terms.traffic == pytest.approx(counted / 2)  # two links at once
    elif name in ("tree", "reduce_broadcast"):
        assert terms.traffic == pytest.approx(2 * max(traffic(name, size)[0]))  # up as much as down
    elif size & (size - 1) == 0 or name in ("ring", "double_binary_tree"):
        assert terms.traffic == pytest.approx(counted)
    else:
        assert terms.traffic >= counted


@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(1, 70))
def test_one_member_pays_nothing_and_more_never_pay_less(name: str, size: int) -> None:
    assert ALGORITHMS[name](1) == Terms(0, 0, 0)
    assert all(term >= 0 for term in ALGORITHMS[name](size))


def test_the_page_shows_the_models_own_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data_parallel.md").read_text()
    shown = page.partition("<!-- costs -->\n")[2].partition("<!-- end of costs -->")[0]
    assert shown == guide(), "python -m engine.collectives.guide prints what belongs between the marks"


def test_the_page_describes_every_choice() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data_parallel.md").read_text()
    table = page.partition("## All-reduce algorithms")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(COLLECTIVES)


@given(st.integers(2, 70), st.floats(1, 1e9))
def test_a_root_whose_links_work_at_once(size: int, n: float) -> None:
    a, b, c = LINK
    assert reduce_broadcast_at_once(size).seconds(n, LINK) == pytest.approx(2 * (a + n * b) + size * n * c)
