"""The short last batch of an epoch: left out where that is asked for, no reason to refuse a run that ends before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import command
import pytest
import torch
from harness import run_threads, settings
from torch import Tensor, nn

from engine.job import Job
from engine.prepare.prepare import prepare
from engine.report.progress import _steps
from engine.settings import AllReduceSettings, Eval, Settings
from engine.training.samples.batches import Batches

engine, trained = command.engine, command.trained  # fixtures


def wanted(samples: int, **changes: Any) -> Settings:
    drop = {} if (drop := changes.pop("drop_last", None)) is None else {"drop_last": drop}
    return settings(data={"_target_": "toys.Tokens", "samples": samples} | drop, **changes)


@pytest.mark.parametrize(("samples", "batches"), [(48, 3), (47, 2), (33, 2), (16, 1)])
def test_the_short_batch_is_left_out(samples: int, batches: int) -> None:
    """As if the samples of the epoch that do not fill a batch had not been drawn."""
    asked = wanted(samples, drop_last=True, steps=None, epochs=2)
    ran = run_threads(asked)
    assert _steps(ran.job) == len(ran.losses()) == 2 * batches
    steps = [record.meta for record in ran.of("step") if record.meta["rank"] == 0]
    assert [meta["epoch"] for meta in steps] == [0] * batches + [1] * batches
    kept = Batches(samples, 16, 1, asked.seed, shuffle=True, drop_last=True)
    every = Batches(samples, 16, 1, asked.seed, shuffle=True)
    assert [kept.count(step) for step in range(2 * batches)] == [16] * 2 * batches
    assert list(kept.shares(0, batches)) == list(every.shares(0, batches))
    other = list(every.shares(0, every.per_epoch + batches))[every.per_epoch :]
    assert list(kept.shares(0, 2 * batches))[batches:] == other  # the second epoch begins where an epoch begins


@pytest.mark.parametrize("replicas", [1, 2])
def test_with_full_batches_it_changes_nothing(replicas: int) -> None:
    first, second = (run_threads(wanted(48, drop_last=drop, replicas=replicas, steps=4)) for drop in (True, False))
    assert first.losses() == second.losses()
    assert all(torch.equal(value, second.state()[key]) for key, value in first.state().items())


def test_no_batch_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.drop_last=true leaves no batch of the 15 samples that data has: "):
        prepare(wanted(15, drop_last=True), ".", ".")
    prepare(wanted(15), ".", ".")


@pytest.mark.slow
def test_it_is_a_key_of_the_configuration(engine: command.Engine, trained: list[tuple[Settings, str, str]]) -> None:
    assert engine("data.drop_last=true").code == engine().code == 0
    assert [made.data["drop_last"] for made, _, _ in trained] == [True, False]
    refused = engine("data.drop_last=some")
    assert refused.code == 2 and "data.drop_last=some" in refused.err


# -- what is never reached ---------------------------------------------------------------------------------------------


class Pairs(nn.Module):
    """Refuses an odd number of samples, and one of 1, as BatchNorm does where there is 1 value per channel."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return x


def pairs() -> list[tuple[str, Any]]:
    return [("a", lambda: nn.Linear(8, 8)), ("b", Pairs), ("c", lambda: nn.Linear(8, 5)), ("d", nn.Identity)]


MODEL = {"_target_": "test_last_batches.pairs", "loss": {"_target_": "toys.TokenLoss"}}


def test_a_batch_that_the_run_never_reaches_is_no_reason_to_refuse_it() -> None:
    reaches = wanted(65, microbatches=2, model=MODEL, steps=5)  # 16, 16, 16, 16, 1
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        prepare(reaches, ".", ".")
    ends_before = replace(reaches, train=replace(reaches.train, steps=4))
    assert len(run_threads(ends_before).losses()) == 4
    leaves_out = wanted(65, microbatches=2, model=MODEL, steps=9, drop_last=True)
    assert len(run_threads(leaves_out).losses()) == 9


def programs(job: Job) -> list[int]:
    return sorted(job.steps)


def test_programs_are_those_of_the_batches_that_come() -> None:
    assert programs(prepare(wanted(18, steps=1), ".", ".")) == [0, 4]
    assert programs(prepare(wanted(18, steps=2), ".", ".")) == [0, 2, 4]
    assert programs(prepare(wanted(18, steps=None, epochs=1), ".", ".")) == [0, 2, 4]
    assert programs(prepare(wanted(18, steps=5, drop_last=True), ".", ".")) == [0, 4]


def test_an_asynchronous_schedule_needs_no_sample_in_a_batch_left_out() -> None:
    asked = wanted(17, schedule="pipedream", replicas=2, global_batch_size=4, steps=8)
    with pytest.raises(ValueError, match=r"without samples, .* choose data\.drop_last=true, a train\."):
        prepare(asked, ".", ".")
    dropped = replace(asked, data=asked.data | {"drop_last": True})
    assert len(run_threads(dropped).losses()) == 8


# -- buffers in evaluations --------------------------------------------------------------------------------------------

KINDS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.float64,
)  # fmt: skip


class Buffers(nn.Module):
    """Buffers of every dtype that training sets by its own samples."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in KINDS:
            self.register_buffer(str(dtype).removeprefix("torch."), torch.zeros(9, dtype=torch.uint8).to(dtype))
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("empty", torch.zeros(0, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for name, buffer in self.named_buffers():
                if name not in ("mask", "empty"):
                    with torch.no_grad():
                        buffer.copy_(x.reshape(-1)[:9] > 0)
        return x


def with_buffers() -> list[tuple[str, Any]]:
    return [("a", Buffers), ("b", lambda: nn.Linear(8, 8)), ("c", Buffers), ("d", lambda: nn.Linear(8, 5))]


def buffers_of(worker: Any) -> dict[str, Tensor]:
    return {f"{name}": b.clone() for stage in worker.stages.values() for name, b in stage.named_buffers()}


@pytest.mark.parametrize("name", ["ring", "native", "recursive_doubling", "sharded_parameter_server"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow(keep=3)
def test_evaluation_borrows_buffers_of_every_dtype(name: str, ranks: int) -> None:
    """Every replica evaluates with the first one's, bit for bit, and has its own afterwards."""
    before, during, after = ({} for _ in range(3))

    def watch(worker: Any) -> None:
        run, tally, me = worker.evaluation.run, worker.evaluation._tally, worker.world_rank

        def tallied() -> Any:
            during[me] = buffers_of(worker)
            return tally()

        def watched(done: int) -> Any:
            before[me] = buffers_of(worker)
            found = run(done)
            after[me] = buffers_of(worker)
            return found

        worker.evaluation.run, worker.evaluation._tally = watched, tallied

    asked = settings(
        "gpipe", ranks, 2, 2,
        model={"_target_": "test_last_batches.with_buffers", "loss": {"_target_": "toys.TokenLoss"}},
        data={"_target_": "toys.Tokens", "evaluation": {"samples": 16}},
        allreduce=AllReduceSettings(name), eval=Eval(every=None), steps=1,
    )  # fmt: skip
    ran = run_threads(asked, watch)
    assert len(ran.of("evaluation")) == 2
    for rank in range(ranks):
        lent, other = before[rank], before[rank + ranks]
        assert len(lent) == (len(KINDS) + 2) * 2 // ranks
        assert any(not torch.equal(lent[key], other[key]) for key in lent)  # replicas have seen other samples
        for replica in (rank, rank + ranks):
            assert all(torch.equal(during[replica][key], lent[key]) for key in lent)
            assert all(torch.equal(after[replica][key], before[replica][key]) for key in lent)
