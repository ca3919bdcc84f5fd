"""Schedules that keep two copies of each stage (dualpipe, chimera): one model all the same, trained as one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import pytest
import torch
from command import LIMIT_S, Engine, engine_process
from harness import ADAM, SGD, Ran, close, equal, plain, run_threads, settings
from torch import Tensor

from engine.account.measure import Measure
from engine.account.records.gather import Evaluations, Step, Steps
from engine.plan.schedules import build
from engine.plan.timeline import Kind
from engine.plan.verify import peak_in_flight
from engine.settings import AllReduceSettings, Eval, Settings
from engine.training.worker import Worker

engine = command.engine  # a fixture

SIZES = [
    ("dualpipe", 2, 4),
    ("dualpipe", 2, 6),
    ("dualpipe", 4, 8),
    ("chimera", 2, 2),
    ("chimera", 4, 4),
    ("chimera", 4, 8),
]
each = pytest.mark.parametrize(("schedule", "ranks", "microbatches"), SIZES)
NORMED = {"_target_": "toys.normed", "loss": {"_target_": "toys.TokenLoss"}}


def wanted(schedule: str, ranks: int, microbatches: int, replicas: int = 1, **changes: Any) -> Settings:
    """Uneven micro-batches, a blank sample in two, and a short last batch in the third step."""
    batch = replicas * microbatches + 3
    data = {"_target_": "toys.Tokens", "blank": 2, "samples": 2 * batch + 3, "evaluation": {"samples": 13}}
    return settings(schedule, ranks, microbatches, replicas, global_batch_size=batch, **{"data": data} | changes)


def as_gpipe(given: Settings) -> Settings:
    return replace(given, schedule={"name": "gpipe"})


def watched(given: Settings) -> tuple[Ran, dict[int, list[dict[str, Tensor]]]]:
    """A run, and by world rank all weights after each step, under `stage.name`."""
    weights: dict[int, list[dict[str, Tensor]]] = {}

    def watch(worker: Worker) -> None:
        seen, apply = weights.setdefault(worker.world_rank, []), worker.update.apply

        def applied() -> None:
            apply()
            named = ((f"{s}.{n}", p) for s, stage in worker.stages.items() for n, p in stage.named_parameters())
            seen.append({name: p.detach().clone() for name, p in named})

        worker.update.apply = applied  # type: ignore[method-assign]

    return run_threads(given, watch), weights


def steps_of(ran: Ran) -> list[Step]:
    steps = Steps(ran.job)
    return [step for record in ran.of("step") if (step := steps.add(record))]


@each
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("optimizer", "allreduce"), [(SGD, "ring"), (ADAM, "native")], ids=["sgd-ring", "adam-native"])
@pytest.mark.slow(keep=1)
def test_equals_one_process_and_copies_stay_equal(
    schedule: str, ranks: int, microbatches: int, replicas: int, optimizer: dict[str, Any], allreduce: str
) -> None:
    """Clipping, ignored targets, uneven and short batches; all copies of a stage are bitwise equal after each step."""
    given = wanted(
        schedule,
        ranks,
        microbatches,
        replicas,
        optimizer=optimizer,
        clip_norm=0.05,
        allreduce=AllReduceSettings(allreduce),
    )
    expected, losses = plain(as_gpipe(given), microbatched=True)
    ran, weights = watched(given)
    close(ran.state(), expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-9)
    for at in range(3):
        copies: dict[str, list[Tensor]] = {}
        for rank in range(ranks * replicas):
            for name, value in weights[rank][at].items():
                copies.setdefault(name, []).append(value)
        for name, values in copies.items():
            assert len(values) == 2 * replicas, name
            assert all(torch.equal(value, values[0]) for value in values), name
    peaks = {r.meta["rank"]: r.meta["peak_in_flight"] for r in ran.of("step") if r.meta["step"] == 0}
    assert [peaks[rank] for rank in range(ranks)] == peak_in_flight(build(schedule, ranks, microbatches))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), [("dualpipe", 2, 4), ("chimera", 4, 4)])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.slow(keep=1)
def test_every_parameter_is_counted_once(
    schedule: str, ranks: int, microbatches: int, replicas: int, clip_norm: float | None
) -> None:
    """In the norm that is logged, clipping or not; and what both ends compute adds up to the loss of the batch."""
    given = wanted(schedule, ranks, microbatches, replicas, clip_norm=clip_norm)
    ran, other = steps_of(run_threads(given)), steps_of(run_threads(as_gpipe(given)))
    assert [step.grad_norm for step in ran] == pytest.approx([step.grad_norm for step in other], rel=1e-9)
    assert [step.loss for step in ran] == pytest.approx([step.loss for step in other], rel=1e-9)
    assert [step.samples for step in ran] == [step.samples for step in other]


def test_both_ends_compute_losses_of_their_own_direction() -> None:
    ran = run_threads(wanted("dualpipe", 4, 8, data={"_target_": "toys.Tokens"}))
    for record in ran.of("step"):
        last = record.meta["rank"] in (0, 3)
        spans = record.arrays["spans"].tolist()
        ended = sorted(m for kind, stage, m, *_ in spans if kind == Kind.F and stage == 3)
        assert ended == {0: [4, 5, 6, 7], 3: [0, 1, 2, 3]}.get(record.meta["rank"], [])
        assert (record.meta["loss_count"] is not None) == last
        assert not last or record.meta["loss_count"] > 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_reduction_shows_in_trace_and_account(replicas: int) -> None:
    """A REDUCE of every stage on both of its ranks, although there may be one replica only; bytes of 2R members."""
    ran = run_threads(wanted("chimera", 4, 4, replicas))
    elements = {name: value.numel() for name, value in ran.state().items()}
    for record in ran.of("step"):
        spans = record.arrays["spans"].tolist()
        rank = record.meta["rank"] % 4
        assert {stage for kind, stage, *_ in spans if kind == Kind.REDUCE} == {rank, 3 - rank}
        assert {stage for kind, stage, *_ in spans if kind == Kind.WAIT_REDUCE} == {rank, 3 - rank}
        members, sent = 2 * replicas, record.meta["reduce_bytes_sent"]
        layers = [f"block{rank}" if rank < 3 else "head", f"block{3 - rank}" if rank else "head"]
        least = 8 * sum(n for name, n in elements.items() if name.startswith(tuple(layers)))
        assert sent >= 2 * (members - 1) / members * least
    measure, (step, *_) = Measure(ran.job), steps_of(ran)
    assert step.recorded is not None
    measure.add(step.recorded.timeline)
    assert (result := measure.result()) is not None and result.costs is not None


@pytest.mark.slow
def test_evaluation_goes_one_way_and_counts_every_sample_once() -> None:
    given = wanted("dualpipe", 4, 8, 2, eval=Eval(1, 6))
    found = []
    for run in (given, as_gpipe(given)):
        ran = run_threads(run)
        evaluations = Evaluations(ran.job)
        found.append([e for record in ran.of("evaluation") if (e := evaluations.add(record))])
    assert [e.step for e in found[0]] == [1, 2, 3] and {e.samples for e in found[0]} == {13}
    for mine, other in zip(*found, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=1e-9) and mine.accuracy == other.accuracy


def test_statistics_of_a_copy_are_those_of_its_own_microbatches() -> None:
    """As between replicas; an evaluation neither changes them nor the training."""
    given = wanted("chimera", 2, 4, model=NORMED, steps=2)
    alone, ran = run_threads(given), run_threads(replace(given, eval=Eval(1)))
    expected, _ = plain(as_gpipe(given), microbatched=True)
    trained = {name for stage in alone.workers[0].stages.values() for name, _ in stage.named_parameters()}
    for rank in (0, 1):
        mine, other = (states(r, rank) for r in (alone, ran))
        assert equal(mine, other)
        close({k: mine[k] for k in trained}, {k: expected[k] for k in trained})
    assert [states(alone, rank)["a.norm.num_batches_tracked"].item() for rank in (0, 1)] == [4, 4]
    assert not torch.equal(*(states(alone, rank)["a.norm.running_mean"] for rank in (0, 1)))


def states(ran: Ran, rank: int) -> dict[str, Tensor]:
    return {k: v for stage in ran.workers[rank].stages.values() for k, v in stage.state_dict().items()}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.slow(keep=1)
def test_evaluation_uses_the_statistics_of_the_first_copy(replicas: int) -> None:
    given = wanted("chimera", 2, 4, replicas, model=NORMED, eval=Eval(0))
    ran = run_threads(given)
    means: list[Tensor] = []

    def probe(worker: Worker) -> None:
        for index, stage in worker.stages.items():
            if index == 0:
                stage.layers[0].module.norm.register_forward_hook(note)

    def note(module: Any, _: Any, __: Any) -> None:
        if not module.training:
            means.append(module.running_mean.clone())

    run_threads(replace(given, eval=Eval(3)), probe)
    first = states(ran, 0)["a.norm.running_mean"]
    assert means and all(torch.equal(mean, first) for mean in means)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.slow(keep=1)
def test_dropout_and_accumulation_equal_one_process(accumulate: int) -> None:
    """Masks belong to micro-batches, not to ranks."""
    model = {"_target_": "toys.mlp4", "p": 0.4, "loss": {"_target_": "toys.TokenLoss"}}
    given = settings("chimera", 4, 4, model=model, accumulate=accumulate, global_batch_size=4 * accumulate)
    expected, losses = plain(as_gpipe(given), microbatched=True)
    ran = run_threads(given)
    close(ran.state(), expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-9)


@pytest.mark.process
@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("dualpipe", ["pipeline.ranks=4", "pipeline.microbatches=8"]),
        ("chimera", ["pipeline.ranks=2", "data_parallel.replicas=2", "allreduce=native"]),
    ],
)
@pytest.mark.slow(most=2)
def test_in_processes_of_its_own(schedule: str, layout: list[str], engine: Engine, tmp_path: Path) -> None:
    """gloo: the losses and the evaluation of 1f1b with threads, and all files."""
    common = ["model=mlp", "model.features=16", "model.hidden=8", "data=synthetic", "data.shape=[16]", "precision=fp64"]
    common += [*layout, "train.steps=3", "train.clip_norm=0.1", "threads_per_worker=1"]
    process = engine_process([*common, f"schedule={schedule}"], tmp_path)
    assert engine(*common, "schedule=1f1b", "launch=threads", "hydra.run.dir=other").code == 0
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, "")
    (folder,) = tmp_path.glob("runs/*/*")
    assert {"report.txt", "trace.json", "timeline.png"} <= {path.name for path in folder.iterdir()}
    mine, other = (json.loads((path / "summary.json").read_text()) for path in (folder, tmp_path / "other"))
    assert mine["loss"]["last"] == pytest.approx(other["loss"]["last"], rel=1e-9)
    assert mine["evaluation"]["samples"] == other["evaluation"]["samples"] == 64
    assert mine["evaluation"]["loss"] == pytest.approx(other["evaluation"]["loss"], rel=1e-9)
    assert mine["allreduce"]["bytes_sent_per_rank"] > 0
