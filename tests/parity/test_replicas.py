"""Law 1 with each all-reduce: replicas equal one plain process, and each other to the last bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command import engine_process
from harness import close, equal, plain, run_threads, settings
from torch import Tensor

from engine.collectives import COLLECTIVES
from engine.prepare.prepare import prepare
from engine.settings import AllReduceSettings, Settings
from engine.training.replicas.reduction import collective_of, grouped

Expected = tuple[int, tuple[dict[str, Tensor], list[float]]]  # replicas, state and losses of one plain process


def base(replicas: int) -> Settings:
    """Uneven shares, small buckets: several reductions per step of different sizes."""
    return settings("1f1b", 2, 2, replicas, global_batch_size=19, clip_norm=0.05, steps=2)


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda replicas: f"R={replicas}")
def expected(request: pytest.FixtureRequest) -> Expected:
    return request.param, plain(base(request.param), microbatched=True)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.slow(keep=3)
def test_training_equals_one_process_with_each_all_reduce(name: str, expected: Expected) -> None:
    replicas, (state, losses) = expected
    ran = run_threads(replace(base(replicas), allreduce=AllReduceSettings(name, bucket_bytes=300)))
    close(ran.state(), state)
    assert ran.losses() == pytest.approx(losses, rel=1e-9)
    for other in range(1, replicas):
        assert equal(ran.state(0), ran.state(other))


@pytest.mark.parametrize("sharded", [False, True])
def test_empty_tensors_are_sent_and_reduced_as_such(sharded: bool) -> None:
    """C059: parts of a boundary without elements, and a parameter of shape (0,)."""
    model = {"_target_": "toys.odd_boundary", "how": "hollow", "loss": {"_target_": "toys.TokenLoss"}}
    partition = {"name": "manual", "split": ["begins"]}
    wanted = settings(
        "1f1b", 2, 2, 2, model=model, partition=partition, steps=2, allreduce=AllReduceSettings(bucket_bytes=1)
    )
    ran = run_threads(replace(wanted, shard_optimizer=sharded))
    close(ran.state(), plain(wanted, microbatched=True)[0])
    assert ran.state()["ends.nothing"].shape == (0,)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("mode", ["sparse", "functional"])
def test_sparse_gradients_are_refused_before_anything_starts(mode: str, replicas: int) -> None:
    """C135: by the layer and the operator that makes them, however it is called."""
    model = {"_target_": "toys.embedded", "mode": mode, "loss": {"_target_": "toys.TokenLoss"}}
    wanted = settings("1f1b", 2, 2, replicas, model=model, data={"_target_": "toys.Words"})
    with pytest.raises(ValueError, match=r"layer 'words' makes sparse gradients \(aten.embedding.*use sparse=False"):
        prepare(wanted, ".", ".")
    for other in ("dense", "frozen"):
        assert prepare(replace(wanted, model=model | {"mode": other}), ".", ".").replicas == replicas


def test_hierarchical_groups_are_configurable() -> None:
    state, _ = plain(base(4), microbatched=True)
    ran = run_threads(replace(base(4), allreduce=AllReduceSettings("hierarchical", 300, group_size=2)))
    close(ran.state(), state)
    assert equal(ran.state(0), ran.state(3))
    wanted = replace(base(4), allreduce=AllReduceSettings("hierarchical", 300, group_size=3))
    with pytest.raises(
        ValueError, match=r"groups of 3 replicas, but there are 4.*allreduce\.group_size that divides 4"
    ):
        prepare(wanted, ".", ".")


@pytest.mark.parametrize("group_size", [1, 2])
def test_hierarchical_counts_both_copies_of_a_stage_into_a_host(group_size: int) -> None:
    """dualpipe keeps each stage twice: groups of replicas are twice as many members."""
    wanted = settings("dualpipe", 2, 4, 2, allreduce=AllReduceSettings("hierarchical", 300, group_size), steps=2)
    ran = run_threads(wanted)
    close(ran.state(), plain(wanted, microbatched=True)[0])
    (sizes,) = {
        tuple(map(len, reduction.rings(4)[0])) for reduction in ran.workers[0].pipeline.communicators.reduction.values()
    }
    assert sizes == (2 * group_size,) * (2 // group_size)


@pytest.mark.parametrize(
    ("per_host", "ranks", "replicas", "size"),
    [(8, 2, 4, 4), (4, 2, 4, 2), (2, 2, 4, 1), (1, 2, 4, 1), (6, 2, 4, 1), (3, 2, 6, 1), (4, 1, 8, 4), (4, 8, 4, 1)],
)
def test_hosts_are_what_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch, per_host: int, ranks: int, replicas: int, size: int
) -> None:
    for key, value in {"RANK": 0, "WORLD_SIZE": ranks * replicas, "MASTER_ADDR": "x", "MASTER_PORT": 1,
                       "LOCAL_WORLD_SIZE": per_host}.items():  # fmt: skip
        monkeypatch.setenv(key, str(value))
    wanted = settings(ranks=ranks, replicas=replicas, allreduce=AllReduceSettings("hierarchical"))
    assert grouped(wanted).allreduce.group_size == size
    kind = collective_of(grouped(wanted), range(2 * replicas))  # two copies of a stage per replica
    assert kind.group_size == 2 * size


def test_without_a_launcher_all_replicas_are_on_one_host() -> None:
    assert grouped(settings(replicas=4, allreduce=AllReduceSettings("hierarchical"))).allreduce.group_size == 4
    assert grouped(settings(replicas=4)).allreduce == AllReduceSettings()


@pytest.mark.process
@pytest.mark.slow
def test_processes_train_alike_whatever_the_all_reduce(tmp_path: Path) -> None:
    """Trees with channels of their own, and one that measures first: three replicas, over what the host has."""
    small = ["model=mlp", "data=synthetic", "model.features=16", "data.shape=[16]", "data.samples=64", "eval.every=0"]
    small += ["train.steps=3", "train.global_batch_size=12", "pipeline.ranks=1", "pipeline.microbatches=2"]
    choices = ["double_binary_tree", "auto"]
    small += ["precision=fp64", "data_parallel.replicas=3", f"allreduce={','.join(choices)}"]
    process = engine_process(["-m", *small], tmp_path)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    jobs = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/*-sweep/*/summary.json"))]
    assert [job["allreduce"]["name"] for job in jobs] == choices
    for job in jobs[1:]:
        assert job["loss"]["last"] == pytest.approx(jobs[0]["loss"]["last"], rel=1e-9)
    assert min(job["allreduce"]["bytes_sent_per_rank"] for job in jobs) > 0
