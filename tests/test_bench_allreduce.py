"""scripts/bench allreduce: the fit finds what times were made of; a small world is measured from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from benchmarks import allreduce
from benchmarks.allreduce_worker import Spec, in_threads
from benchmarks.link import bus_bandwidth, fit, fitted, table
from engine.collectives import COLLECTIVES
from engine.collectives.allreduce.costs import ALGORITHMS, LinkCosts

SIZES = [10**k for k in range(3, 9)]
links = st.builds(LinkCosts, st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8), st.floats(0, 1e-9))


@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(2, 8), links)
def test_fit_finds_alpha_and_beta(name: str, ranks: int, link: LinkCosts) -> None:
    terms = ALGORITHMS[name](ranks)
    found = fit(terms, {n: terms.seconds(n, link) for n in SIZES}, link.gamma)
    assert found == pytest.approx(link, rel=1e-6)


def test_a_fit_is_never_negative() -> None:
    terms = ALGORITHMS["ring"](4)
    assert fit(terms, {10**3: 1e-9, 10**8: 1.0}, 0.0).alpha == 0.0
    assert fit(terms, {10**3: 1e-3, 10**8: 1e-4}, 0.0).beta == 0.0


def test_algorithms_of_one_link_agree_with_the_common_one() -> None:
    link = LinkCosts(5e-5, 1e-9, 1e-10)
    times = {name: {n: terms(4).seconds(n, link) for n in SIZES} for name, terms in ALGORITHMS.items()}
    result = fitted({**times, "native": times["ring"]}, 4, link.gamma)
    assert result["common"] == pytest.approx(link._asdict())
    assert set(result["algorithms"]) == set(ALGORITHMS)
    assert all(each["off_common"] < 1e-6 for each in result["algorithms"].values())


def test_bus_bandwidth_is_that_of_the_fewest_bytes() -> None:
    assert bus_bandwidth(10**9, 2, 1.0) == 1e9
    assert bus_bandwidth(10**9, 4, 0.5) == 3e9


@pytest.mark.slow
def test_a_small_world_of_threads_is_measured_and_summed_up() -> None:
    spec = Spec(3, [400, 40_000], list(COLLECTIVES), 2)
    ranks = in_threads(spec)
    assert [len(t) for times in ranks for by_size in times.values() for t in by_size.values()] == [2] * (
        3 * (len(COLLECTIVES) + 2) * 2
    )  # a copy and an addition too
    world = allreduce.summed_up(spec, ranks)
    assert set(world["seconds"]) == set(COLLECTIVES)
    assert world["peer"] == "native"
    assert world["ratio_to_peer"]["native"] == {400: 1.0, 40_000: 1.0}
    for n in spec.sizes:
        assert world["ratio_to_memcpy"]["ring"][n] == pytest.approx(
            world["bus_bandwidth"]["ring"][n] / (n / world["memcpy"][n])
        )
    lines = table(world).splitlines()
    assert lines[0].split()[:3] == ["N=3", "threads", "memcpy"]
    assert [line.split()[:2] for line in lines[1:3]] == [["400", "B"], ["40", "KB"]]


@pytest.mark.process
@pytest.mark.slow
def test_the_command_measures_gloo_in_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{root / 'scripts'}:{root}")
    file = tmp_path / "out.json"
    names = ["ring", "native", "auto", "gloo"]
    chosen = ["--bytes", "1000", "100000", "--rounds", "1", "--algorithms", *names]
    allreduce.main(["--ranks", "2", "--threads", *chosen, "--json", str(file)])
    worlds = json.loads(file.read_text())["worlds"]
    assert [world["transport"] for world in worlds] == ["shared_memory", "gloo"]
    assert all(list(world["seconds"]) == names and world["peer"] == "gloo" for world in worlds)
    assert capsys.readouterr().out.startswith("N=2 shared_memory  memcpy GB/s")
