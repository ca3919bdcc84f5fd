"""The optimizer divided over replicas, or on a server: the numbers of the run without that, at the published cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ADAM, SGD, Ran, plain, run_threads, settings

from engine.allreduces import ALLREDUCES
from engine.cli.run import write_plan
from engine.gradients.division import DIVISIONS
from engine.plan.actions import Action, Op
from engine.plan.timeline import Kind
from engine.prepare.prepare import prepare
from engine.settings import AllReduceSettings, Eval, Settings

MLP = {"_target_": "toys.mlp", "loss": {"_target_": "toys.TokenLoss"}}


def both(wanted: Settings) -> tuple[Ran, Ran]:
    """The same run with and without shards."""
    return run_threads(replace(wanted, shard_optimizer=True)), run_threads(wanted)


def same(sharded: Ran, whole: Ran, bitwise: bool) -> None:
    """Every replica holds the weights of the other run, and the losses were its."""
    for replica in range(sharded.job.replicas):
        for name, value in whole.state().items():
            if bitwise:
                assert torch.equal(sharded.state(replica)[name], value), name
            else:
                torch.testing.assert_close(sharded.state(replica)[name], value, rtol=1e-9, atol=1e-12)
    assert sharded.losses() == pytest.approx(whole.losses(), rel=1e-9)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    ("schedule", "replicas", "changes"),
    [
        ("gpipe", 2, {}),
        ("1f1b", 3, {}),
        ("1f1b", 2, {"allreduce": AllReduceSettings(bucket_bytes=1)}),
        ("1f1b", 2, {"clip_norm": 0.01}),
        ("zb_h1", 2, {"accumulate": 2}),
        ("zb_v", 2, {}),
        ("interleaved_1f1b", 2, {"eval": Eval(every=1)}),
    ],
)
@pytest.mark.slow(most=9)
def test_the_numbers_are_those_without_shards(
    schedule: str, replicas: int, changes: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """To the last bit, but for clipping, whose norm is summed from pieces, and for three summands, whose order depends
    on where a bucket is cut."""
    batch = 16 * changes.get("accumulate", 1)
    wanted = settings(
        schedule, 2, 4, replicas=replicas, optimizer=optimizer, **{"model": MLP, "global_batch_size": batch} | changes
    )
    if schedule == "interleaved_1f1b":
        wanted = replace(wanted, schedule={"name": schedule, "chunks": 2})
    same(*both(wanted), bitwise=replicas == 2 and "clip_norm" not in changes)


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, None], ids=["1", "2", "3", "inf"])
@pytest.mark.parametrize(("schedule", "replicas"), [("gpipe", 2), ("1f1b", 3), ("dualpipe", 1), ("chimera", 2)])
@pytest.mark.slow(most=8)
def test_pieces_are_clipped_by_the_norm_of_the_whole(schedule: str, replicas: int, power: float | None) -> None:
    """Small buckets cut parameters apart; two copies of a stage share its optimizer."""
    wanted = settings(schedule, 2, 4, replicas=replicas, model=MLP, clip_norm=0.01, clip_norm_type=power)
    same(*both(replace(wanted, allreduce=AllReduceSettings(bucket_bytes=64))), bitwise=False)


@pytest.mark.parametrize("name", ["parameter_server", "sharded_parameter_server"])
@pytest.mark.parametrize(("schedule", "replicas"), [("1f1b", 2), ("gpipe", 3), ("zb_h1", 2)])
@pytest.mark.slow
def test_servers_train_as_an_all_reduce_does(schedule: str, replicas: int, name: str) -> None:
    wanted = settings(schedule, 2, 4, replicas=replicas, model=MLP, optimizer=ADAM, eval=Eval(every=2))
    served = run_threads(replace(wanted, allreduce=AllReduceSettings(name, bucket_bytes=2000)))
    same(served, run_threads(wanted), bitwise=replicas == 2)


@pytest.mark.parametrize("allreduce", ["ring", *DIVISIONS])
@pytest.mark.slow(keep=1)
def test_the_program_lists_what_is_gathered_and_the_trace_shows_it(allreduce: str, tmp_path: Path) -> None:
    """A GATHER of every stage behind each STEP, in the step of a replica without samples too; it is awaited, and so
    recorded, in the step after."""
    wanted = settings("zb_v", 2, 4, replicas=2, steps=3, model=MLP, allreduce=AllReduceSettings(allreduce))
    ran = run_threads(replace(wanted, shard_optimizer=allreduce == "ring"))
    for program in ran.job.steps.values():
        for rank, row in enumerate(program.rows):
            tail = [Action.unpack(code) for code in row[-3:]]
            stages = ran.job.placement.stages_of(rank)
            assert tail == [Action(stages[0], Op.STEP), *(Action(stage, Op.GATHER) for stage in stages)]
    for record in ran.of("step"):
        kinds, stages = record.arrays["spans"][:, 0], record.arrays["spans"][:, 1]
        own = [] if record.meta["step"] == 0 else ran.job.placement.stages_of(record.meta["rank"] % 2)
        assert sorted(stages[kinds == Kind.GATHER]) == sorted(stages[kinds == Kind.WAIT_GATHER]) == own
    write_plan(ran.job.settings, ran.job.compute, tmp_path)
    lowered = json.loads((tmp_path / "plan.json").read_text())["lowered"]
    assert ["".join(row[-2:]) for row in lowered] == ["0GATHER3GATHER", "1GATHER2GATHER"]


def test_without_division_nothing_is_gathered() -> None:
    assert [name for name in ALLREDUCES if Settings(allreduce=AllReduceSettings(name)).divided] == [*DIVISIONS]
    ran = run_threads(settings("1f1b", 2, 4, replicas=2, steps=2, model=MLP))
    assert not any(Op.GATHER in {Action.unpack(c).op for c in row} for p in ran.job.steps.values() for row in p.rows)
    assert not any({Kind.GATHER, Kind.WAIT_GATHER} & set(r.arrays["spans"][:, 0].tolist()) for r in ran.of("step"))


@pytest.mark.slow
def test_a_server_updates_whole_parameters() -> None:
    """So any optimizer will do; one that looks at rows and columns, say."""
    adafactor = {"_target_": "torch.optim.Adafactor", "lr": 0.1}
    wanted = settings("1f1b", 2, 4, replicas=2, model=MLP, optimizer=adafactor)
    same(
        run_threads(replace(wanted, allreduce=AllReduceSettings("parameter_server"))), run_threads(wanted), bitwise=True
    )


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_server_has_all_of_the_state_and_most_of_the_traffic(replicas: int) -> None:
    """A worker sends its gradients, the server the parameters to each worker: n and (N-1) n per step."""
    wanted = settings("1f1b", 1, 2, replicas=replicas, steps=2, model=MLP, optimizer=ADAM)
    ran = run_threads(replace(wanted, allreduce=AllReduceSettings("parameter_server")))
    optimizers = [ran.workers[rank].update.optimizer for rank in range(replicas)]
    assert optimizers[0] is not None and len(optimizers[0].state) == 32 and optimizers[1:] == [None] * (replicas - 1)
    sent = [r.meta["reduce_bytes_sent"] for rank in range(replicas) for r in ran.of("step")
            if r.meta["step"] == 1 and r.meta["rank"] == rank]  # fmt: skip
    (bucket,) = ran.workers[0].reducers[0].buckets
    head, body = bucket.head * 8, (bucket.elements - bucket.head) * 8
    heads = 2 * (replicas - 1) * head  # all-reduced along a ring
    assert sum(sent) == heads + 2 * (replicas - 1) * body
    assert sent[0] - (replicas - 1) * body == pytest.approx(heads / replicas, abs=16)
    assert all(one - body == pytest.approx(heads / replicas, abs=16) for one in sent[1:])


def test_it_is_one_process_after_all() -> None:
    wanted = settings("1f1b", 2, 4, replicas=2, model=MLP, optimizer=ADAM, clip_norm=0.05, shard_optimizer=True)
    expected, _ = plain(wanted, microbatched=True)
    for name, value in run_threads(wanted).state().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_a_parameter_that_no_replica_used_is_left_alone() -> None:
    """Weight decay would move it; C035."""
    model = {"_target_": "toys.sometimes", "loss": {"_target_": "toys.TokenLoss"}}
    same(*both(settings("gpipe", 1, 2, replicas=2, steps=4, model=model, global_batch_size=4)), bitwise=True)


@pytest.mark.parametrize("replicas", [2, 4])
def test_each_rank_keeps_its_part_of_the_state_and_sends_what_an_all_reduce_sends(replicas: int) -> None:
    """Adam keeps two numbers per parameter; pieces end at multiples of 64 bytes, so the parts differ by less than one
    line per parameter. The head of a bucket is all-reduced, the rest scattered and, before the next step, gathered:
    2(N-1)/N of the whole."""
    model = {"_target_": "toys.mlp", "layers": 4, "width": 32, "loss": {"_target_": "toys.TokenLoss"}}
    data = {"_target_": "toys.Tokens", "width": 32}
    wanted = settings("1f1b", 1, 2, replicas=replicas, steps=2, model=model, data=data, optimizer=ADAM)
    sharded, whole = both(wanted)

    def state_bytes(ran: Ran, rank: int) -> int:
        optimizer = ran.workers[rank].update.optimizer
        assert optimizer is not None
        return sum(v.nbytes for s in optimizer.state.values() for k, v in s.items() if k != "step")

    full, parts = state_bytes(whole, 0), [state_bytes(sharded, rank) for rank in range(replicas)]
    assert sum(parts) == full
    buckets = len(sharded.workers[0].reducers[0].buckets)
    assert all(abs(part - full / replicas) <= 2 * 64 * 10 * buckets for part in parts)
    sent = [sum(r.meta["reduce_bytes_sent"] for r in ran.of("step") if r.meta["step"] == 1) for ran in (sharded, whole)]
    wire = sharded.workers[0].reducers[0].wire_bytes
    assert sent[0] == 2 * (replicas - 1) * wire
    assert sent[0] <= sent[1] * 1.05


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shard_optimizer=true .* data_parallel.replicas=1"):
        prepare(settings("1f1b", 2, 4, shard_optimizer=True), ".", ".")
    with pytest.raises(ValueError, match=r"schedule=pipedream_2bw keeps several versions"):
        prepare(settings("pipedream_2bw", 2, 4, replicas=2, shard_optimizer=True), ".", ".")
    with pytest.raises(ValueError, match=r"allreduce=parameter_server contradict each other"):
        server = AllReduceSettings("parameter_server")
        prepare(settings("1f1b", 2, 4, replicas=2, allreduce=server, shard_optimizer=True), ".", ".")
    adafactor = {"_target_": "torch.optim.Adafactor"}
    with pytest.raises(ValueError, match=r"shard_optimizer=true cannot divide torch.optim.Adafactor.*Adam, "):
        prepare(settings("1f1b", 2, 4, replicas=2, optimizer=adafactor, shard_optimizer=True), ".", ".")
