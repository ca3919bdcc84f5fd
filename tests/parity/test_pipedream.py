"""Asynchronous PipeDream trains as its papers say: bit for bit the delayed updates of one process."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import engine_process
from delayed import delayed, version_read
from harness import ADAM, SGD, Ran, close, equal, run_threads, settings
from tensorboards import read
from toys import Hiding

from engine.cli.config import check, from_plain
from engine.pipeline.batches.window import Window
from engine.pipeline.stage.versions import Versions
from engine.plan.schedules import build
from engine.plan.views.text import to_csv
from engine.prepare.prepare import prepare
from engine.report.recorder import Recorder
from engine.settings import Eval, Settings
from engine.training.worker import Worker

PIPEDREAM: dict[str, Any] = {"name": "pipedream"}
VERTICAL = {"name": "pipedream", "vertical_sync": True}
TWO_BUFFERS = {"name": "pipedream_2bw"}
DROPOUT = {"_target_": "toys.mlp4", "p": 0.3, "loss": {"_target_": "toys.TokenLoss"}}

each = pytest.mark.parametrize("schedule", [PIPEDREAM, VERTICAL, TWO_BUFFERS], ids=["plain", "vertical", "2bw"])
either = pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
RUN = [
    *("schedule=pipedream", "pipeline.ranks=2", "data_parallel.replicas=2", "model=mlp", "model.features=16"),
    *("model.hidden=8", "model.depth=4", "data=synthetic", "data.shape=[16]", "data.samples=24", "eval.every=4"),
    *("train.steps=6", "train.global_batch_size=5", "precision=fp64", "device=cpu", "threads_per_worker=1"),
]


def asynchronous(schedule: dict[str, Any], ranks: int, replicas: int = 1, **changes: Any) -> Settings:
    """8 updates of 10 samples, of which many do not count; micro-batches of uneven sizes where there are several."""
    defaults = {
        "steps": 8,
        "global_batch_size": 10,
        "data": {"_target_": "toys.Tokens", "blank": 3, "samples": 60},
    }
    return replace(settings("gpipe", ranks, 4, replicas, **defaults | changes), schedule=schedule)


def compare(ran: Ran, wanted: Settings) -> None:
    expected, losses = delayed(wanted)
    assert equal(ran.state(), expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-12)


@either
@each
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.slow(keep=2)
def test_equals_the_delayed_updates_of_one_process_bitwise(
    ranks: int, schedule: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """With dropout; the epoch ends with update 6."""
    wanted = asynchronous(schedule, ranks, optimizer=optimizer, model=DROPOUT)
    compare(run_threads(wanted), wanted)


@each
@pytest.mark.slow(keep=1)
def test_a_run_drains_for_each_evaluation_and_at_the_end(schedule: dict[str, Any]) -> None:
    """Windows of 3, 3 and 2 updates: each begins with nothing in flight and one version of the weights."""
    held_out = {"_target_": "toys.Tokens", "samples": 60, "evaluation": {"samples": 23}}
    wanted = asynchronous(schedule, 3, data=held_out, eval=Eval(every=3))
    ran = run_threads(wanted)
    assert ran.job.windows == (3, 3, 2)
    compare(ran, wanted)
    assert [record.meta["step"] for record in ran.of("evaluation")] == [3, 6, 8]
    unseen = run_threads(replace(wanted, eval=Eval(every=0)))
    assert unseen.job.windows == (8,)
    assert not equal(unseen.state(), ran.state())  # draining changes what an update reads


@each
@pytest.mark.slow(keep=1)
def test_replicas_train_as_one_process_does(schedule: dict[str, Any]) -> None:
    """R = 2 with shares of different sizes: replicas stay equal, and the sum of gradients is that of the batch."""
    wanted = asynchronous(schedule, 3, replicas=2, global_batch_size=9, data={"_target_": "toys.Tokens", "samples": 36})
    ran = run_threads(wanted)
    expected, losses = delayed(wanted)
    assert equal(ran.state(0), ran.state(1))
    close(ran.state(), expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_epoch_may_end_with_a_short_update(ranks: int) -> None:
    """37 samples in updates of 8: the fifth has 5, the next epoch begins behind it without a drain."""
    wanted = asynchronous(PIPEDREAM, ranks, global_batch_size=8, data={"_target_": "toys.Tokens", "samples": 37})
    compare(run_threads(wanted), wanted)


def test_fewer_samples_than_micro_batches_make_a_smaller_update() -> None:
    """Of 20 samples 2 are left for the third update: too few to have the weights of one update before on all stages."""
    wanted = asynchronous(TWO_BUFFERS, 2, global_batch_size=9, data={"_target_": "toys.Tokens", "samples": 20})
    ran = run_threads(wanted)
    assert list(ran.job.streams) == [(4, 4, 2, 4, 4, 2, 4, 4)]
    compare(ran, wanted)


def test_running_statistics_follow_the_forwards() -> None:
    """Buffers have no versions: BatchNorm's statistics are those of all micro-batches in order."""
    model = {"_target_": "toys.normed", "loss": {"_target_": "toys.TokenLoss"}}
    wanted = asynchronous(PIPEDREAM, 3, model=model)
    ran = run_threads(wanted)
    compare(ran, wanted)
    assert ran.state()["a.norm.num_batches_tracked"] == 8


@each
@pytest.mark.slow(keep=2)
def test_the_rate_of_each_update_is_the_schedulers(schedule: dict[str, Any]) -> None:
    scheduler = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5}
    wanted = asynchronous(schedule, 3, lr_scheduler=scheduler)
    ran = run_threads(wanted)
    compare(ran, wanted)
    for rank in range(3):
        rates = [r.meta["lr"] for r in ran.of("step") if r.meta["rank"] == rank]
        assert rates == pytest.approx([0.1 * 0.5**step for step in range(8)])


@pytest.mark.parametrize("reentrant", [False, True])
@each
@pytest.mark.slow(keep=1)
def test_a_layer_that_is_recomputed_reads_the_weights_of_its_forward(schedule: dict[str, Any], reentrant: bool) -> None:
    """The trap: a swap of the weights around the forward alone lets the recomputation read newer ones, silently."""
    model = {"_target_": "toys.mlp4", "loss": {"_target_": "toys.TokenLoss"}}
    again = model | {"_target_": "toys.checkpointed", "reentrant": reentrant}
    plain, recomputed = (run_threads(asynchronous(schedule, 3, model=m, optimizer=ADAM)) for m in (model, again))
    assert equal(plain.state(), recomputed.state())
    compare(plain, asynchronous(schedule, 3, model=model, optimizer=ADAM))


@pytest.mark.parametrize("target", ["toys.recurrent", "toys.tied_inside", "toys.partly_frozen", "toys.sequential"])
@pytest.mark.slow(keep=3)
def test_layers_that_hold_weights_in_unusual_ways(target: str) -> None:
    """A recurrent layer's own list of weights, a weight used twice, frozen weights, an nn.Sequential."""
    wanted = asynchronous(PIPEDREAM, 3, model={"_target_": target, "loss": {"_target_": "toys.TokenLoss"}})
    compare(run_threads(wanted), wanted)


def test_a_layer_that_hides_its_weights_is_refused() -> None:
    """It would read the newest weights in its forward, and be changed before its backward."""
    layer = Hiding(4)
    versions = Versions(0, [layer])
    versions.begin(0, np.zeros(2, dtype=np.int64))
    x = torch.ones(2, 4)
    loss = versions.forward(0, lambda: layer(x).sum())
    with pytest.raises(RuntimeError, match=r"Hiding\.linear\.weight was read past its module's attributes"):
        versions.backward(0, loss.backward)


@pytest.mark.parametrize(("schedule", "kept"), [(PIPEDREAM, [4, 3, 2, 1]), (VERTICAL, [4] * 4), (TWO_BUFFERS, [2] * 4)])
@pytest.mark.slow(keep=2)
def test_versions_and_staleness_are_those_of_the_papers_and_measured(schedule: dict[str, Any], kept: list[int]) -> None:
    """C040. Counted in memory: each version is a storage of its own, the newest is the optimizer's."""
    most = [0] * 4

    def watch(worker: Worker) -> None:
        (stage,) = worker.stages.values()
        versions = stage.versions
        assert versions is not None
        told = worker._updated

        def updated(window: Window) -> None:
            storages = {p.data_ptr() for p in versions.memory()}
            newest = {p.data_ptr() for layer in stage.layers for p in layer.module.parameters()}
            assert newest <= storages
            most[worker.rank] = max(most[worker.rank], len(storages) // len(newest))
            told(window)

        worker._updated = updated  # type: ignore[method-assign]

    ran = run_threads(asynchronous(schedule, 4, steps=12), watch)
    assert most == kept
    steps = [record for record in ran.of("step") if record.meta["step"] == 8]
    assert [r.meta["weight_versions"] for r in sorted(steps, key=lambda r: r.meta["rank"])] == kept
    for record in ran.of("step"):
        rows = record.arrays["versions"]
        assert len(rows) == ran.job.microbatches
        for stage, _, forward, backward in rows.tolist():
            assert forward == backward == version_read(schedule, 4, stage, record.meta["step"])
        assert record.meta["peak_in_flight"] <= 4 - record.meta["rank"]


def test_memory_does_not_grow_with_the_window() -> None:
    """C069, C071: samples, graphs, losses and versions of updates that are done are gone."""
    held = {}
    for steps in (10, 40):
        most = [0]

        def watch(worker: Worker, most: list[int] = most) -> None:
            told = worker._updated

            def updated(window: Window) -> None:
                told(window)
                (stage,) = worker.stages.values()
                held_here = [len(window._held), len(window.feed.losses), stage.in_flight, worker.links.outstanding]
                most[0] = max(most[0], *held_here)

            worker._updated = updated  # type: ignore[method-assign]

        run_threads(asynchronous(PIPEDREAM, 3, steps=steps), watch)
        held[steps] = most[0]
    assert held[10] == held[40] <= 4


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"clip_norm": 1.0}, r"train.clip_norm=1.0 is not possible with schedule pipedream: .* null"),
        ({"accumulate": 2}, r"train.accumulate=2 is not possible with schedule pipedream"),
    ],
)
def test_what_all_stages_would_do_together_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check(asynchronous(PIPEDREAM, 2, **changes))


def test_a_batch_need_not_hold_a_window() -> None:
    """Of pipedream M is only what mode=plan prints: one sample per update will do."""
    check(asynchronous(PIPEDREAM, 2, global_batch_size=1))
    with pytest.raises(ValueError, match=r"pipeline\.microbatches=4 is more than the 3 sample"):
        check(asynchronous(TWO_BUFFERS, 2, global_batch_size=3))


def test_a_replica_without_samples_is_refused() -> None:
    wanted = asynchronous(PIPEDREAM, 2, 2, global_batch_size=4, data={"_target_": "toys.Tokens", "samples": 9})
    with pytest.raises(ValueError, match=r"data_parallel\.replicas=2 without samples"):
        prepare(wanted, ".", ".")


@pytest.mark.slow
def test_a_window_too_long_to_be_proven_is_refused() -> None:
    wanted = asynchronous(PIPEDREAM, 2, steps=10**6)
    with pytest.raises(ValueError, match=r"1,000,000 micro-batches .* 524,288 are possible: drain more often"):
        prepare(wanted, ".", ".")


def test_a_file_with_updates_between_micro_batches_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "program.csv"
    path.write_text(to_csv(build("pipedream", 2, 3)))
    with pytest.raises(ValueError, match="lists updates between micro-batches"):
        build("csv", 2, 3, {"path": str(path)})


@pytest.mark.parametrize(
    ("schedule", "behind", "kept"), [(PIPEDREAM, [2, 1, 0], [3, 2, 1]), (TWO_BUFFERS, [1] * 3, [2] * 3)]
)
@pytest.mark.slow(keep=1)
def test_the_report_says_what_kind_of_training_it_was(
    schedule: dict[str, Any], behind: list[int], kept: list[int], tmp_path: Path
) -> None:
    wanted = asynchronous(schedule, 3, steps=10)
    ran, console = run_threads(wanted), io.StringIO()
    recorder = Recorder(ran.job, tmp_path, console=console)
    for record in sorted(ran.records, key=lambda r: r.meta.get("step", -1)):
        recorder(record)
    summary = recorder.finish("completed")
    assert (summary["staleness"], summary["weight_versions"]) == (behind, kept)
    told = summary["asynchronous"]
    assert (told["updates_between_drains"], told["steady_updates"]) == (10, 4)
    assert told["microbatches_per_update"] == (1 if schedule is PIPEDREAM else 4)
    assert summary["bubble"]["ideal"] == pytest.approx(0, abs=1e-9)
    assert 0 <= summary["bubble"]["predicted"] <= told["predicted_with_transfer"] + 1e-9 < 1
    assert 0 < told["predicted_with_variation"] < 1
    assert "beyond what is usual" not in console.getvalue()
    for text in (console.getvalue(), (tmp_path / "report.txt").read_text()):
        assert (
            f"not the synchronous optimisation: gradients are computed with weights that are up to {behind[0]}" in text
        )
    curves = read(tmp_path)
    assert [curves.Scalars(f"staleness/stage{s}")[-1].value for s in range(3)] == behind
    assert [curves.Scalars(f"memory/rank{r}/weight_versions")[-1].value for r in range(3)] == kept


@pytest.mark.process
@pytest.mark.slow
def test_processes_train_as_threads_do(tmp_path: Path) -> None:
    """One real run: two replicas, an evaluation in the middle."""
    process = engine_process([*RUN, f"hydra.run.dir={tmp_path}"], tmp_path)
    try:
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    summary = json.loads((tmp_path / "summary.json").read_text())
    ran = run_threads(from_plain(json.loads((tmp_path / "config.json").read_text())))
    assert summary["loss"]["last"] == pytest.approx(ran.losses()[-1], rel=1e-12)
    assert summary["weight_versions"] == [2, 1]
    assert len(json.loads((tmp_path / "plan.json").read_text())["program"][0]) == 2 * 4
