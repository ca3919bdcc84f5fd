"""Programs with split backwards and several stages per rank, executed with ranks as threads: as one plain process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import ADAM, Ran, close, equal, plain, run_threads, settings
from hypothesis import assume, given
from hypothesis import settings as examples
from program_strategies import executed

from engine.plan.actions import COMPUTE, Action, Op, Placement, Program
from engine.plan.schedules import SCHEDULES, ScheduleInfo, build
from engine.plan.verify import peak_in_flight
from engine.settings import AllReduceSettings, Settings

MLP = {"_target_": "toys.mlp", "loss": {"_target_": "toys.TokenLoss"}}


def run_program(program: Program, replicas: int = 1, **changes: Any) -> tuple[Ran, Settings]:
    """Train by a program of one's own; short batches go forward and then backward."""
    wanted = settings("gpipe", program.ranks, program.microbatches, replicas, **{"model": MLP} | changes)

    def only(ranks: int, microbatches: int) -> str | None:
        return None if microbatches == program.microbatches else "it is written down for another number"

    info = ScheduleInfo(program.name, "a test's", lambda ranks, microbatches: program, {}, requires=only)
    with patch.dict(SCHEDULES, {program.name: info}):
        return run_threads(replace(wanted, schedule={"name": program.name})), wanted


def halved(program: Program, behind: int, every: int = 1) -> Program:
    """B of every `every`-th micro-batch as I and W, W `behind` backwards later or at the end of the row."""
    rows: list[list[Action]] = []
    for rank in range(program.ranks):
        row: list[Action] = []
        owed: list[Action] = []
        for action in program.actions(rank):
            if action.op is not Op.B:
                row.append(action)
            elif action.microbatch % every:
                row += [*owed, action]  # gradients are added in ascending order
                owed = []
            else:
                row.append(action._replace(op=Op.I))
                owed.append(action._replace(op=Op.W))
                if len(owed) > behind:
                    row.append(owed.pop(0))
        rows.append(row + owed)
    return Program.of("halved", program.placement, program.microbatches, rows)


@examples(max_examples=25)
@given(executed())
@pytest.mark.slow
def test_any_valid_program_equals_one_process(program: Program) -> None:
    """Any placement, any order, full and split backwards mixed, one or two copies of each stage: there is one loop."""
    placement = program.placement
    assume(all(placement.stages_of(rank) for rank in range(placement.ranks)))
    ran, wanted = run_program(program, global_batch_size=7, clip_norm=0.05, optimizer=ADAM, steps=2)
    expected, losses = plain(wanted, microbatched=True)
    close(ran.state(), expected)
    assert placement.copies > 1 or equal(ran.state(), expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-12)
    assert [worker.executor.peak_in_flight for _, worker in sorted(ran.workers.items())] == peak_in_flight(program)


@pytest.mark.parametrize(("behind", "every"), [(0, 1), (1, 1), (2, 1), (99, 1), (1, 2)])
@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), [("1f1b", 3, 5), ("gpipe", 2, 4), ("1f1b", 1, 3)])
@pytest.mark.slow
def test_weight_gradients_put_off(schedule: str, ranks: int, microbatches: int, behind: int, every: int) -> None:
    program = halved(build(schedule, ranks, microbatches), behind, every)
    ran, wanted = run_program(program, clip_norm=0.05, data={"_target_": "toys.Tokens", "samples": 41})
    expected, losses = plain(wanted, microbatched=True)
    assert equal(ran.state(), expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-12)
    for record in ran.of("step"):
        if record.meta["microbatches"] != microbatches:
            continue
        done = [tuple(span[:3]) for span in record.arrays["spans"].tolist() if span[0] in COMPUTE]
        assert done == [(a.op, a.stage, a.microbatch) for a in program.actions(record.meta["rank"])]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({"_target_": "toys.mlp4", "p": 0.4}, {}),
        ({"_target_": "toys.sometimes"}, {}),
        ({"_target_": "toys.normed"}, {}),
        ({"_target_": "toys.odd_boundary", "how": "dict"}, {}),
        ({"_target_": "toys.odd_boundary", "how": "transposed"}, {}),
        ({"_target_": "toys.mlp"}, {"accumulate": 2}),
    ],
    ids=["dropout", "sometimes", "norms", "dict", "in place", "accumulate"],
)
@pytest.mark.slow(keep=3)
def test_odd_models(model: dict[str, Any], changes: dict[str, Any]) -> None:
    model = {**model, "loss": {"_target_": "toys.TokenLoss"}}
    ran, wanted = run_program(halved(build("1f1b", 2, 4), 1), model=model, **changes)
    expected, _ = plain(wanted, microbatched=True)
    assert equal(ran.state(), expected)


GPT = {"_target_": "models.gpt.gpt", "context": 8, "layers": 2, "width": 8, "heads": 2, "dropout": 0.1}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
@pytest.mark.slow(keep=1)
def test_a_transformer(schedule: str, precision: str) -> None:
    """Also under autocast the weights are those of whole backwards."""
    model = {**GPT, "loss": {"_target_": "models.gpt.NextTokenLoss"}}
    data = {"_target_": "models.data.Text", "context": 8, "max_bytes": 4000}
    wanted = settings("gpipe", 2, 4, model=model, data=data, precision=precision, optimizer=ADAM)
    whole = run_threads(wanted)
    assert equal(run_threads(replace(wanted, schedule={"name": schedule})).state(), whole.state())


@pytest.mark.slow
def test_convolutions_and_batch_norms() -> None:
    """ResNet-50 in four pieces, the first and the last on one rank."""
    model = {"_target_": "models.resnet.resnet50", "classes": 10, "width": 16, "zero_residual": False}
    model["loss"] = {"_target_": "torch.nn.CrossEntropyLoss"}
    data = {"_target_": "models.data.Digits", "size": 32}
    base = {"model": model, "data": data, "precision": "fp32", "steps": 2, "global_batch_size": 8}
    whole = run_threads(settings("gpipe", 2, 2, partition={"name": "parameters"}, **base))
    halves = run_threads(settings("zb_v", 2, 2, partition={"name": "parameters"}, **base))
    assert equal(whole.state(), halves.state())


@pytest.mark.parametrize("allreduce", ["ring", "native"])
@pytest.mark.slow
def test_replicas_of_ranks_with_several_stages(allreduce: str) -> None:
    """Three replicas, of which some get fewer micro-batches in the last batch of an epoch, and one gets none."""
    for samples in (45, 44):
        wanted = settings(
            "zb_v",
            2,
            4,
            3,
            model=MLP,
            steps=4,
            global_batch_size=21,
            allreduce=AllReduceSettings(name=allreduce),
            data={"_target_": "toys.Tokens", "samples": samples},
        )
        expected, losses = plain(wanted, microbatched=True)
        ran = run_threads(wanted)
        assert equal(ran.state(0), ran.state(1))
        assert equal(ran.state(0), ran.state(2))
        close(ran.state(), expected)
        assert ran.losses() == pytest.approx(losses, rel=1e-9)


def test_replicas_reduce_in_one_order_whatever_their_micro_batches_are() -> None:
    """One replica runs a program that completes the first stage before the last, the other a shorter batch's."""
    placement = Placement(1, ((0, 0),))
    row = [Action(s, Op.F, m) for m in range(3) for s in (0, 1)]
    for m in range(3):
        row += [Action(1, Op.I, m), Action(0, Op.B, m)]
    program = Program.of("drawn", placement, 3, [row + [Action(1, Op.W, m) for m in range(3)]])
    data = {"_target_": "toys.Tokens", "samples": 17}  # 12, then 5: three samples and two
    ran, wanted = run_program(program, 2, global_batch_size=12, data=data)
    expected, _ = plain(replace(wanted, schedule={"name": "gpipe"}), microbatched=True)
    assert equal(ran.state(0), ran.state(1))
    close(ran.state(), expected)


# ---- memory ------------------------------------------------------------------------------------------------------


def peaks(ran: Ran) -> list[int]:
    """Peak activation bytes of each rank."""
    ranks = range(ran.job.ranks)
    return [max(r.meta["peak_activation_bytes"] for r in ran.of("step") if r.meta["rank"] == rank) for rank in ranks]


@pytest.mark.slow
def test_memory_is_flat_in_microbatches() -> None:
    found = [peaks(run_program(halved(build("1f1b", 3, m), 1), global_batch_size=2 * m)[0]) for m in (4, 8, 16)]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_what_waits_for_its_weight_gradients_is_counted() -> None:
    """The later W comes, the more is kept; halves done one after the other keep what the whole keeps."""

    def peak(behind: int) -> Sequence[int]:
        return peaks(run_program(halved(build("1f1b", 2, 8), behind), global_batch_size=16)[0])

    at_once, two, all_of_them = peak(0), peak(2), peak(99)
    for rank in (0, 1):
        assert at_once[rank] < two[rank] < all_of_them[rank]


@pytest.mark.slow
def test_schedules_that_trade_time_for_memory_keep_less() -> None:
    found = {}
    for name in ("v_min", "v_half", "zb_v", "zb_h1", "zb_h2"):
        found[name] = max(peaks(run_threads(settings(name, 4, 12, global_batch_size=24, model=MLP))))
    assert found["v_min"] < found["v_half"] < found["zb_v"]
    assert found["zb_h1"] < found["zb_h2"]


@pytest.mark.slow
def test_nothing_stays_from_step_to_step() -> None:
    """Spare buffers of messages may differ by a few, what a step leaves behind would be ten times one or more."""
    counts = []
    for steps in (2, 12):
        ran = run_threads(settings("zb_v", 2, 4, model=MLP, steps=steps))
        stages = [stage for worker in ran.workers.values() for stage in worker.stages.values()]
        assert all(stage.in_flight == stage.live_bytes == 0 for stage in stages)
        gc.collect()
        counts.append(sum(type(thing) in (torch.Tensor, torch.nn.Parameter) for thing in gc.get_objects()))
        del ran, stages
    assert counts[1] < counts[0] + 10
