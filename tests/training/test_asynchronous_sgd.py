"""Asynchronous replicas: bit for bit what one process makes of the same pushes in the same order, and nobody waits."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import LIMIT_S, engine_process
from harness import ADAM, SGD, Ran, cut_in, run_threads, settings
from torch import Tensor, nn

from engine.gradients.servers.pushes import PushReducer
from engine.pipeline.losses import make_loss
from engine.pipeline.seeds import building, seed_for
from engine.prepare.prepare import prepare
from engine.settings import AllReduceSettings, DataParallelSettings, Delay, Eval, Settings
from engine.training.build import DTYPES, build_optimizer, model_layers
from engine.training.samples.batches import Batches
from engine.training.samples.source import dataset
from engine.training.worker import Worker

MLP = {"_target_": "toys.mlp", "loss": {"_target_": "toys.TokenLoss"}}
SERVERS = ["parameter_server", "sharded_parameter_server"]


def asynchronous(
    replicas: int,
    server: str = "parameter_server",
    max_staleness: int | None = None,
    schedule: str = "gpipe",
    ranks: int = 1,
    **changes: Any,
) -> Settings:
    """A run whose last replica is slower than the others."""
    given = {
        "model": MLP, "steps": 5, "global_batch_size": 8 * replicas,
        "allreduce": AllReduceSettings(server, bucket_bytes=2000),
        "delay": Delay(ranks=[[ranks * (replicas - 1), 3]]),
        "data_parallel": DataParallelSettings(replicas, "async", max_staleness),
    }  # fmt: skip
    return settings(schedule, ranks, 2, replicas, **given | changes)


def pushes(ran: Ran) -> list[dict[str, int]]:
    """What every replica was told of its pushes."""
    names = ("stage", "owner", "read", "applied", "held_ns")
    found = []
    for record in ran.of("step"):
        where = {"replica": record.meta["rank"] // ran.job.ranks, "step": record.meta["step"]}
        found += [where | dict(zip(names, row, strict=True)) for row in record.arrays["pushes"].tolist()]
    return found


def same_everywhere(ran: Ran) -> None:
    state = ran.state(0)
    for replica in range(1, ran.job.replicas):
        assert all(torch.equal(value, ran.state(replica)[name]) for name, value in state.items())


# ---- the same pushes in one process ------------------------------------------------------------------------------


class Replay:
    """One process that applies the pushes of a run in the order in which its server did: no threads, no messages."""

    def __init__(self, ran: Ran) -> None:
        self.job, self.wanted = ran.job, ran.job.settings
        self.dtype = DTYPES[self.wanted.precision]
        self.layers: list[nn.Module] = []
        for number in range(len(self.job.layers)):
            with building(self.wanted.seed, number):
                self.layers.append(model_layers(self.wanted.model)[number][1]().to(self.dtype))
        ends = [*self.job.split[1:], len(self.layers)]
        self.stages = [self.layers[a:b] for a, b in zip(self.job.split, ends, strict=True)]
        self.parameters = [[p for layer in stage for p in layer.parameters()] for stage in self.stages]
        self.history = [[self.values(s)] for s in range(len(self.stages))]
        self.loss, self.data = make_loss(self.wanted.model["loss"]), dataset(self.wanted.data, evaluation=False)
        train = self.wanted.train
        batches = Batches(self.job.train_samples, train.global_batch_size, 1, self.wanted.seed, True)
        self.shares = list(batches.shares(0, batches.steps(train.steps, train.epochs)))

    def values(self, stage: int) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters[stage]]

    def set(self, stage: int, version: int) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters[stage], self.history[stage][version], strict=True):
                parameter.copy_(value)

    def gradients(self, replica: int, step: int) -> list[list[Tensor | None]]:
        """Of each stage, at the weights that the parameters hold; divided by what the replica's own samples count."""
        indices = self.shares[step]
        x = torch.stack([self.data[i][0] for i in indices]).to(self.dtype)
        y = torch.stack([self.data[i][1] for i in indices])
        own = [c for c in cut_in(self.wanted, len(indices), self.job.microbatches) if c[0] == replica]
        total = sum(self.loss.count(y[start : start + rows], None) for _, _, start, rows in own)
        for _, microbatch, start, rows in own:
            value = x[start : start + rows].clone()
            for number, layer in enumerate(self.layers):
                if self.job.layers[number].random:
                    torch.manual_seed(seed_for(self.wanted.seed, "draw", number, step, microbatch, replica))
                value = layer(value)
            if total:
                (self.loss(value, y[start : start + rows]) / total).backward()
        whole = [p for own in self.parameters for p in own]
        if self.wanted.train.clip_norm is not None:
            nn.utils.clip_grad_norm_(whole, self.wanted.train.clip_norm)
        found = [[p.grad for p in own] for own in self.parameters]
        for parameter in whole:
            parameter.grad = None
        return found

    def run(self, told: list[dict[str, int]]) -> dict[str, Tensor]:
        """The final state. `told`: the pushes of all stages."""
        read = {(push["replica"], push["step"], push["stage"]): push["read"] for push in told}
        orders = []
        for stage in range(len(self.stages)):
            order = sorted((p for p in told if p["stage"] == stage), key=lambda push: push["applied"])
            assert [push["applied"] for push in order] == list(range(len(order))), "each version is made by one push"
            orders.append([(push["replica"], push["step"]) for push in order])
        made = [build_optimizer(self.job, own) for own in self.parameters]
        known: dict[tuple[int, int], list[list[Tensor | None]]] = {}
        while any(len(h) <= len(o) for h, o in zip(self.history, orders, strict=True)):
            before = sum(map(len, self.history))
            for stage, (order, (optimizer, scheduler)) in enumerate(zip(orders, made, strict=True)):
                done = len(self.history[stage]) - 1
                if done == len(order):
                    continue
                push = order[done]
                versions = [read[*push, s] for s in range(len(self.stages))]
                if push not in known:
                    if any(version >= len(h) for version, h in zip(versions, self.history, strict=True)):
                        continue  # another stage has not come so far
                    for s, version in enumerate(versions):
                        self.set(s, version)
                    known[push] = self.gradients(*push)
                self.set(stage, done)
                for parameter, gradient in zip(self.parameters[stage], known[push][stage], strict=True):
                    parameter.grad = gradient
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if scheduler is not None and (done + 1) % self.job.replicas == 0:
                    scheduler.step()
                self.history[stage].append(self.values(stage))
            assert sum(map(len, self.history)) > before, "the order of the pushes is impossible"
        for stage, versions in enumerate(self.history):
            self.set(stage, len(versions) - 1)
        names = [layer.name for layer in self.job.layers]
        return {f"{n}.{k}": v for n, l in zip(names, self.layers, strict=True) for k, v in l.state_dict().items()}  # noqa: E741


STEPPED = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5}
SOMETIMES = {"_target_": "toys.sometimes", "loss": {"_target_": "toys.TokenLoss"}}
SEVEN = {"_target_": "toys.Tokens", "samples": 7}
DROPOUT = {"_target_": "toys.mlp4", "p": 0.3, "loss": {"_target_": "toys.TokenLoss"}}


@pytest.mark.parametrize(
    ("replicas", "ranks", "schedule", "changes"),
    [
        (3, 1, "gpipe", {"optimizer": SGD}),
        (3, 1, "gpipe", {"optimizer": ADAM, "max_staleness": 1}),
        (2, 2, "1f1b", {"optimizer": SGD, "clip_norm": 0.05}),
        (3, 2, "zb_v", {"optimizer": ADAM}),
        (2, 1, "gpipe", {"optimizer": SGD, "lr_scheduler": STEPPED, "accumulate": 2, "global_batch_size": 19}),
        (2, 1, "gpipe", {"model": SOMETIMES, "global_batch_size": 4}),
        (2, 2, "1f1b", {"model": DROPOUT, "optimizer": ADAM}),
        (3, 1, "gpipe", {"data": SEVEN, "global_batch_size": 6}),  # every other batch leaves two without samples
    ],
)
@pytest.mark.slow(keep=1)
def test_training_is_a_replay_of_the_pushes_bit_for_bit(
    replicas: int, ranks: int, schedule: str, changes: dict[str, Any]
) -> None:
    ran = run_threads(asynchronous(replicas, schedule=schedule, ranks=ranks, **changes))
    same_everywhere(ran)
    told = pushes(ran)
    assert len(told) == ran.job.placement.stages * replicas * 5
    expected = Replay(ran).run(told)
    for name, value in ran.state().items():
        assert torch.equal(value, expected[name]), name


def test_the_replay_notices_another_order() -> None:
    """Momentum: it matters which of two pushes comes first."""
    ran = run_threads(asynchronous(2))
    told = pushes(ran)
    first, second = (next(push for push in told if push["applied"] == place) for place in (0, 1))
    first["applied"], second["applied"], second["read"] = 1, 0, 0
    expected = Replay(ran).run(told)
    assert any(not torch.equal(value, expected[name]) for name, value in ran.state().items())


# ---- in step -----------------------------------------------------------------------------------------------------

PLAIN = {"_target_": "torch.optim.SGD", "lr": 0.2}
EQUAL = {"_target_": "models.mlp.mlp", "features": 8, "hidden": 8, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}
SAMPLES = {  # each batch is shared out evenly
    "_target_": "models.data.Synthetic",
    "samples": 144,
    "shape": [8],
    "dtype": "float64",
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(("replicas", "ranks", "schedule"), [(2, 1, "gpipe"), (3, 1, "gpipe"), (2, 2, "1f1b")])
@pytest.mark.slow(keep=2)
def test_without_staleness_plain_sgd_at_one_rth_of_the_rate_is_synchronous(
    server: str, replicas: int, ranks: int, schedule: str
) -> None:
    """R updates by lr/R each, all computed from one version, are one update by the mean of R equal shares."""
    equal: dict[str, Any] = {"model": EQUAL, "data": SAMPLES, "eval": Eval(every=2)}
    wanted = asynchronous(replicas, server, 0, schedule, ranks, optimizer=PLAIN | {"lr": 0.2 / replicas}, **equal)
    ran = run_threads(wanted)
    same_everywhere(ran)
    for push in pushes(ran):
        assert push["read"] == replicas * push["step"] and push["applied"] // replicas == push["step"]
    sync = replace(wanted, optimizer=PLAIN, data_parallel=DataParallelSettings(replicas), allreduce=AllReduceSettings())
    expected = run_threads(sync)
    for name, value in expected.state().items():
        torch.testing.assert_close(ran.state()[name], value, rtol=1e-9, atol=1e-12)
    assert ran.losses() == pytest.approx(expected.losses(), rel=1e-9)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("bound", [0, 2, None])
@pytest.mark.slow(keep=1)
def test_no_push_is_staler_than_the_bound_allows(server: str, bound: int | None) -> None:
    ran = run_threads(asynchronous(3, server, bound, steps=8))
    told = pushes(ran)
    owners = {push["owner"] for push in told}
    assert owners == ({0} if server == "parameter_server" else {0, 1, 2})
    assert len(told) == 3 * 8 * len(owners)
    most = 16 if bound is None else 2 * (2 * bound + 1)
    assert 0 <= max(push["applied"] - push["read"] for push in told) <= most
    same_everywhere(ran)


def test_replicas_hold_the_same_weights_wherever_the_run_evaluates() -> None:
    seen: dict[int, list[dict[str, Tensor]]] = {}

    def watch(worker: Worker) -> None:
        run = worker.evaluation.run

        def evaluate(done: int) -> list[dict[str, Any]]:
            state = {k: v.clone() for stage in worker.stages.values() for k, v in stage.state_dict().items()}
            seen.setdefault(done, []).append(state)
            return run(done)

        worker.evaluation.run = evaluate  # type: ignore[method-assign]

    data = {"_target_": "toys.Tokens", "evaluation": {"samples": 12}}
    ran = run_threads(asynchronous(3, data=data, eval=Eval(every=2)), watch)
    assert sorted(seen) == [2, 4, 5]
    for states in seen.values():
        assert len(states) == 3 and all(torch.equal(states[0][k], s[k]) for s in states for k in states[0])
    assert {record.meta["step"] for record in ran.of("evaluation")} == {2, 4, 5}


# ---- nobody waits ------------------------------------------------------------------------------------------------


def blocked(hold: Callable[[], None]) -> Callable[[Worker], None]:
    """The last replica's first forward lasts until `hold` returns."""

    def inspect(worker: Worker) -> None:
        if worker.replica == worker.job.replicas - 1:
            (stage,) = worker.stages.values()
            forward, first = stage.forward, threading.Event()

            def slow(*arguments: Any, **keywords: Any) -> Any:
                if not first.is_set():
                    first.set()
                    hold()
                return forward(*arguments, **keywords)

            stage.forward = slow  # type: ignore[method-assign]

    return inspect


def pushed(workers: dict[int, Worker]) -> int:
    """How many pushes of replica 0 its server has applied."""
    reducer = workers[0].reducers[0] if 0 in workers else None
    return reducer.server.pace.clock[0] if isinstance(reducer, PushReducer) and reducer.server else 0


def test_a_slow_replica_holds_up_nobody() -> None:
    """Replica 1 does not finish its first forward before replica 0 has applied all of its pushes."""
    workers: dict[int, Worker] = {}
    done: list[int] = []

    def hold() -> None:
        deadline = time.monotonic() + 15
        while not done or done[-1] < 5:
            assert time.monotonic() < deadline, f"replica 0 waits after {done}"
            done.append(pushed(workers))
            time.sleep(0.001)

    def inspect(worker: Worker) -> None:
        workers[worker.world_rank] = worker
        blocked(hold)(worker)

    ran = run_threads(asynchronous(2), inspect)
    first = [push for push in pushes(ran) if push["replica"] == 1 and push["step"] == 0]
    assert [push["applied"] - push["read"] for push in first] == [5]
    same_everywhere(ran)


def test_a_bound_holds_the_fast_one_back() -> None:
    """It pushes its steps 0 and 1, and may then not begin step 2: that would be two ahead."""
    workers: dict[int, Worker] = {}
    clocks: list[int] = []

    def hold() -> None:
        until = time.monotonic() + 15
        while pushed(workers) < 2:
            assert time.monotonic() < until
            time.sleep(0.001)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            clocks.append(pushed(workers))
            time.sleep(0.001)

    def inspect(worker: Worker) -> None:
        workers[worker.world_rank] = worker
        blocked(hold)(worker)

    ran = run_threads(asynchronous(2, max_staleness=1), inspect)
    assert max(clocks) == 2
    held = [push["held_ns"] for push in pushes(ran) if push["replica"] == 0]
    assert held[0] == 0 and held[1] > 0


@pytest.mark.slow
def test_whoever_is_held_back_hears_of_it_before_its_patience_ends() -> None:
    """Silence for 1 s is a failure. Replica 1 waits longer twice, for a bound and where all meet, and is not lost."""
    late = Delay(ranks=[[0, 1300, 0]])
    ran = run_threads(asynchronous(2, max_staleness=0, steps=2, timeout_s=1.0, delay=late))
    assert max(push["held_ns"] for push in pushes(ran) if push["replica"] == 1) > 1e9
    same_everywhere(ran)


@pytest.mark.slow
def test_digits_are_learnt_without_a_barrier() -> None:
    model = {"_target_": "models.mlp.mlp", "features": 192, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}
    data = {"_target_": "models.data.Digits", "size": 8, "evaluation": {"split": "test"}}
    ran = run_threads(
        asynchronous(
            2, max_staleness=2, model=model, data=data, steps=240, global_batch_size=32, eval=Eval(), delay=Delay(),
            optimizer={"_target_": "torch.optim.SGD", "lr": 0.025, "momentum": 0.9},
        )
    )  # fmt: skip
    metas = [record.meta for record in ran.of("evaluation")]
    assert sum(meta["correct"] for meta in metas) / sum(meta["scored"] for meta in metas) > 0.8


# ---- what goes wrong ---------------------------------------------------------------------------------------------


class Breaks(torch.optim.SGD):
    """Fails in its fourth step."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 4:
            raise ArithmeticError("the optimizer's own mistake")
        return super().step(closure)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.slow(keep=1)
def test_an_error_in_an_update_ends_the_run(server: str) -> None:
    wanted = asynchronous(3, server, optimizer={"_target_": f"{__name__}.Breaks", "lr": 0.1})
    with pytest.raises(ArithmeticError, match="the optimizer's own mistake"):
        run_threads(wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_parallel": DataParallelSettings(2, "sync", 3)}, r"max_staleness=3 .* data_parallel\.mode=sync"),
        (
            {"data_parallel": DataParallelSettings(1, "async")},
            r"mode=async with data_parallel\.replicas=1.*2 replicas or more",
        ),
        (
            {"allreduce": AllReduceSettings("ring")},
            r"allreduce=ring sums .*parameter_server or allreduce=sharded_parameter_s",
        ),
        ({"shard_optimizer": True}, r"shard_optimizer=true sums them"),
        ({"device": "cuda"}, r"between CPUs only.*set device=cpu"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ValueError, match=said):
        prepare(asynchronous(2, **changes), ".", ".")


@pytest.mark.parametrize(
    ("schedule", "said"),
    [("pipedream", r"schedule=pipedream keeps several"), ("dualpipe", r"schedule=dualpipe keeps two copies")],
)
def test_schedules_that_do_not_go_with_it_are_refused(schedule: str, said: str) -> None:
    wanted = replace(asynchronous(2, schedule=schedule, ranks=2), pipeline=settings("1f1b", 2, 4).pipeline)
    with pytest.raises(ValueError, match=said):
        prepare(wanted, ".", ".")


def test_an_optimizer_that_is_not_elementwise_needs_a_whole_server() -> None:
    adafactor = {"_target_": "torch.optim.Adafactor", "lr": 0.1}
    with pytest.raises(ValueError, match=r"cannot divide torch\.optim\.Adafactor"):
        prepare(asynchronous(2, "sharded_parameter_server", optimizer=adafactor), ".", ".")
    ran = run_threads(asynchronous(2, optimizer=adafactor))
    expected = Replay(ran).run(pushes(ran))
    assert all(torch.equal(value, expected[name]) for name, value in ran.state().items())


# ---- processes ---------------------------------------------------------------------------------------------------

SMALL = [
    "model=sleep", "data=synthetic", "pipeline.ranks=1", "pipeline.microbatches=2", "train.global_batch_size=12",
    "data_parallel.replicas=3", "data_parallel.mode=async", "model.forward_ms=2", "model.input_backward_ms=1",
    "model.weight_backward_ms=1",
]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.slow
def test_processes_push_to_a_shard_on_each(transport: str, tmp_path: Path) -> None:
    wanted = ["allreduce=sharded_parameter_server", "data_parallel.max_staleness=1", "train.steps=4", "eval.every=2"]
    process = engine_process([*SMALL, *wanted, f"transport={transport}", "delay.ranks=[[2,8]]"], tmp_path)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    (path,) = tmp_path.glob("runs/*/*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["status"] == "completed" and summary["evaluation"]["step"] == 4
    replicas = summary["data_parallel"]["replicas"]
    pushes = [sum(each["staleness"]["histogram"].values()) for each in replicas]
    assert pushes == [4 * 3] * 3  # to each of three servers in every step
    assert max(each["staleness"]["max"] for each in replicas) <= 2 * 3
    assert summary["allreduce"]["bytes_sent_per_rank"] > 0


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_server_ends_the_run(tmp_path: Path) -> None:
    process = engine_process([*SMALL, "allreduce=parameter_server", "train.steps=100000"], tmp_path)
    log, deadline = "", time.monotonic() + LIMIT_S
    while not (found := re.search(r"\[rank 0\] engine: ready: process (\d+)", log)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
        log = "".join(path.read_text() for path in tmp_path.glob("runs/*/*/engine.log"))
    time.sleep(0.3)
    os.kill(int(found[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    said = err.strip().splitlines()[-1]
    assert said.startswith("error: rank 0") and "was killed by SIGKILL (" in said, err
    (path,) = tmp_path.glob("runs/*/*/summary.json")
    assert json.loads(path.read_text())["status"] == "failed"
