"""Buckets start with their last gradient, in the last micro-batch, in an order that no delay changes (C004, C134)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import ADAM, plain, run_threads, settings
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine.gradients.grad_hooks import GradHooks
from engine.gradients.order import Order
from engine.settings import AllReduceSettings
from engine.training.worker import Worker

SMALL = AllReduceSettings(bucket_bytes=1)  # every gradient is a bucket of its own
MLP = {"_target_": "toys.mlp", "loss": {"_target_": "toys.TokenLoss"}}


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_tasks_start_in_the_order_in_which_they_were_added(first: Sequence[int], second: Sequence[int]) -> None:
    order, started = Order(), []
    for number in range(6):
        assert order.add(lambda number=number: started.append(number)) == number
    for ready in (first, second):
        started.clear()
        for count, number in enumerate(ready, 1):
            order.ready(number)
            done = set(ready[:count])
            assert started == [k for k in range(6) if set(range(k + 1)) <= done]  # all that can start have started


def test_a_watch_hears_of_each_accumulation_and_does_not_keep_its_owner() -> None:
    class Owner:
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            self.heard: list[int] = []
            self.watch = GradHooks(parameters, self.added)

        def added(self, number: int) -> None:
            assert parameters[number].grad is not None
            self.heard.append(number)

    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    owner = Owner(parameters)
    (parameters[0] * parameters[2] * parameters[0]).sum().backward()
    assert sorted(owner.heard) == [0, 2]
    parameters[1].sum().backward()
    assert owner.heard[2:] == [1]
    heard = owner.heard
    del owner
    parameters[1].sum().backward()
    assert len(heard) == 3
    assert not parameters[1]._backward_hooks and not parameters[1]._post_accumulate_grad_hooks


class Log:
    """What each rank issues, in its order; optionally with random delays before and after every computation."""

    def __init__(self, delay_s: float, seed: int) -> None:
        self.delay_s, self.seed = delay_s, seed
        self.issued: dict[int, list[Any]] = {}

    def attach(self, worker: Worker) -> None:
        rank = worker.world_rank
        issued: list[Any] = self.issued.setdefault(rank, [])
        chance = random.Random(f"{self.seed} {rank}")
        for stage, reducer in worker.reducers.items():
            turns, start = {turn: k for k, turn in enumerate(reducer._turns)}, reducer._order._tasks
            for turn, number in turns.items():
                start[turn] = _noted(issued, ("reduce", stage, number), start[turn])
        links = worker.links
        post, send = links.post, links.send
        links.post = lambda *a: (issued.append(("receive", *a[:2])), post(*a))[1]  # type: ignore[method-assign]
        links.send = lambda *a: (issued.append(("send", *a[:2], *a[4:])), send(*a))[1]  # type: ignore[method-assign]
        do = worker.executor._do
        for op in list(do):
            do[op] = self._marked(op, do[op], issued, chance)

    def _marked(self, op: Any, run: Any, issued: list[Any], chance: random.Random) -> Any:
        def marked(stage: int, microbatch: int) -> None:
            time.sleep(chance.random() * self.delay_s)
            issued.append((op.name, stage, microbatch))
            run(stage, microbatch)
            issued.append((f"end {op.name}", stage, microbatch))

        return marked


def _noted(issued: list[Any], what: Any, call: Any) -> Any:
    def noted() -> None:
        issued.append(what)
        call()

    return noted


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b"])
@pytest.mark.slow
def test_the_order_of_all_communication_does_not_depend_on_time(schedule: str) -> None:
    chunks = {"chunks": 2} if schedule == "interleaved_1f1b" else {}
    wanted = settings(schedule, 2, 4, replicas=2, steps=6, model=MLP, allreduce=SMALL)
    wanted = replace(wanted, schedule={"name": schedule, **chunks})
    logs = [Log(delay_s, seed) for seed, delay_s in enumerate((0.0, 0.004, 0.004))]
    states = [run_threads(wanted, log.attach).state() for log in logs]
    assert logs[0].issued == logs[1].issued == logs[2].issued
    assert all(torch.equal(value, states[0][name]) for state in states[1:] for name, value in state.items())
    for rank in (0, 1):  # and it is a function of the place in the pipeline, the same in every replica
        assert logs[0].issued[rank] == logs[0].issued[rank + 2]


@pytest.mark.slow
def test_fifty_delayed_steps_end() -> None:
    log = Log(0.002, 7)
    run_threads(settings("1f1b", 2, 4, replicas=2, steps=50, allreduce=SMALL), log.attach)
    assert sum(entry[0] == "STEP" for entry in log.issued[0]) == 50


@pytest.mark.parametrize(("schedule", "closing"), [("gpipe", "B"), ("1f1b", "B"), ("zb_h1", "W")])
@pytest.mark.slow(keep=2)
def test_buckets_start_inside_the_last_backward_of_their_stage_and_not_before(schedule: str, closing: str) -> None:
    log = Log(0.0, 0)
    ran = run_threads(settings(schedule, 2, 4, replicas=2, steps=1, model=MLP, allreduce=SMALL), log.attach)
    for rank, issued in log.issued.items():
        stage = rank % 2
        last = issued.index((closing, stage, 3)), issued.index((f"end {closing}", stage, 3))
        starts = [at for at, entry in enumerate(issued) if entry[0] == "reduce"]
        assert len(starts) == len(ran.workers[rank].reducers[stage].buckets) == 16
        assert all(last[0] < at < last[1] for at in starts)
        assert [issued[at][2] for at in starts] == list(range(16))


def test_what_only_an_early_microbatch_touched_starts_at_reduce() -> None:
    """C035: nobody says that such a gradient is complete; it is reduced all the same."""
    model = {"_target_": "toys.sometimes", "loss": {"_target_": "toys.TokenLoss"}}
    wanted = settings("gpipe", 1, 4, replicas=2, steps=2, model=model, allreduce=SMALL, optimizer=ADAM)
    state = run_threads(wanted).state()
    expected, _ = plain(wanted, microbatched=True)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**6])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b", "zb_v"])
@pytest.mark.slow(most=6)
def test_training_is_that_of_one_process_whatever_the_buckets(schedule: str, bucket_bytes: int) -> None:
    options = {"chunks": 2} if schedule == "interleaved_1f1b" else {}
    wanted = settings(schedule, 2, 4, replicas=2, model=MLP, allreduce=AllReduceSettings(bucket_bytes=bucket_bytes))
    wanted = replace(wanted, schedule={"name": schedule, **options})
    state = run_threads(wanted).state()
    expected, _ = plain(wanted, microbatched=True)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
