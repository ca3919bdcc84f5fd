"""Going on from a checkpoint equals not having stopped: bit for bit, or within law 1 where the layout is another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ADAM, Ran, close, equal, run_threads, settings
from torch import Tensor

from engine.checkpoint import store
from engine.checkpoint.keeper import Keeper
from engine.checkpoint.names import FOLDER
from engine.checkpoint.store import Checkpoint
from engine.settings import AllReduceSettings, CheckpointSettings, Eval, Settings
from engine.training.worker import Worker

COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 7}
STEPPED = {"_target_": "torch.optim.lr_scheduler.MultiStepLR", "milestones": [2, 5], "gamma": 0.5}
TOKENS = {"_target_": "toys.Tokens", "samples": 40, "evaluation": {"samples": 12}}  # an epoch: 16, 16, 8 samples
MANY = {"_target_": "toys.mlp", "layers": 8, "loss": {"_target_": "toys.TokenLoss"}}
NORMED = {"_target_": "toys.normed", "loss": {"_target_": "toys.TokenLoss"}}
DROPPING = {"_target_": "toys.mlp4", "p": 0.3, "loss": {"_target_": "toys.TokenLoss"}}


def wanted(
    schedule: str = "1f1b", ranks: int = 2, microbatches: int = 4, replicas: int = 1, **changes: Any
) -> Settings:
    """Seven steps over three epochs, evaluated every third, with momentum or moments and a moving rate."""
    base = {"steps": 7, "data": TOKENS, "optimizer": ADAM, "lr_scheduler": COSINE, "eval": Eval(every=3),
            "checkpoint": CheckpointSettings(every_steps=1, keep=99)}  # fmt: skip
    return settings(schedule, ranks, microbatches, replicas, **(base | changes))


LAYOUTS: dict[str, Settings] = {
    "dropout": wanted("gpipe", model=DROPPING, clip_norm=0.5),
    "one process": wanted("gpipe", 1, 4),
    "replicas and statistics": wanted("1f1b", 2, 2, 2, model=NORMED, lr_scheduler=STEPPED),
    "sharded": wanted("1f1b", 2, 2, 2, model=MANY, shard_optimizer=True),
    "server": wanted("1f1b", 2, 2, 2, model=MANY, allreduce=AllReduceSettings("parameter_server")),
    "accumulation": wanted("gpipe", 2, 2, accumulate=2),
    "halves": wanted("zb_h1", 2, 4, model=MANY),
    "copies": wanted("dualpipe", 4, 8, model=MANY, data={"_target_": "toys.Tokens"}),
    "versions": wanted("pipedream_2bw", 2, 2, model=MANY, data={"_target_": "toys.Tokens"}, clip_norm=None),
    "a loss that moves": wanted(
        "gpipe", model={"_target_": "toys.mlp4", "loss": {"_target_": "toys.Centre"}}
    ),
    "loader processes": wanted(
        "gpipe", 2, 2, eval=Eval(every=0),
        model={"_target_": "toys.mlp4", "width": 3, "classes": 3, "loss": {"_target_": "torch.nn.MSELoss"}},
        data={"_target_": "toys.Augmented", "workers": 2},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def keep(ran: Ran) -> list[str]:
    """Make the checkpoints of a run visible, as the parent does; what it reported."""
    lines: list[str] = []
    keeper = Keeper(ran.job, Path(), {"engine": "test"}, dict, lambda level, text: lines.append(text))
    for record in ran.records:
        keeper(record)
    keeper.close()
    return lines


def at(step: int) -> Checkpoint:
    return store.whole(store.folder_of(Path(FOLDER), step))


def moments(ran: Ran) -> dict[str, Tensor]:
    """Every tensor that the optimizers keep, and their rates."""
    found = {}
    for rank, worker in ran.workers.items():
        optimizer = worker.update.optimizer
        for group in optimizer.param_groups if optimizer else ():
            found[f"{rank} rate"] = torch.tensor(group["lr"], dtype=torch.float64)
            for number, parameter in enumerate(group["params"]):
                for key, value in optimizer.state[parameter].items():
                    found[f"{rank} {number} {key}"] = value
    return found


def rates(ran: Ran) -> dict[int, float]:
    """Step -> rate, as a rank with an optimizer logs it."""
    return {record.meta["step"]: lr for record in ran.of("step") if (lr := record.meta["lr"]) is not None}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_going_on_is_bitwise_what_going_through_is(layout: str) -> None:
    asked = LAYOUTS[layout]
    whole = run_threads(asked)
    keep(whole)
    assert store.steps_of(Path(FOLDER)) == [7, 6, 5, 4, 3, 2, 1]
    for step in (1, 3, 7):  # in the middle of an epoch; at its end, after an evaluation; at the run's end
        again = run_threads(asked, resumed=at(step))
        for replica in range(asked.data_parallel.replicas):
            assert equal(again.state(replica), whole.state(replica)), step
        assert equal(moments(again), moments(whole)), step
        assert again.losses() == whole.losses()[step:]
        assert rates(again) == {at: rate for at, rate in rates(whole).items() if at >= step}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    "other",
    [
        wanted("gpipe", 1, 2), wanted("1f1b", 4, 4), wanted("gpipe", 2, 4, partition={"name": "parameters"}),
        wanted("gpipe", 2, 2, 2), wanted("1f1b", 2, 2, 2, shard_optimizer=True), wanted("zb_h1", 2, 4),
        wanted("1f1b", 2, 2, 2, allreduce=AllReduceSettings("sharded_parameter_server")),
    ],
    ids=["P=1", "P=4", "split", "R=2", "sharded", "halves", "servers"],
)  # fmt: skip
@pytest.mark.parametrize(
    "first", [wanted("1f1b", 2, 4), wanted("gpipe", 2, 2, 2, shard_optimizer=True)], ids=["whole", "parts"]
)
def test_another_layout_goes_on_with_the_same_numbers(first: Settings, other: Settings) -> None:
    expected = run_threads(first)
    keep(expected)
    found = run_threads(other, resumed=at(3))
    close(found.state(), expected.state())
    assert found.losses() == pytest.approx(expected.losses()[3:], rel=1e-9)
    assert rates(found) == {at: rate for at, rate in rates(expected).items() if at >= 3}


def test_an_optimizers_state_goes_by_name_not_by_position() -> None:
    """Equal shapes would hide moments that went to other parameters."""

    def model(order: str) -> dict[str, Any]:
        return {"_target_": "toys.paired", "order": order, "loss": {"_target_": "toys.TokenLoss"}}

    expected = run_threads(wanted(model=model("ab")))
    keep(expected)
    found = run_threads(wanted("gpipe", 1, 4, model=model("ba")), resumed=at(3))
    assert list(found.state()) != list(expected.state())
    close({name: found.state()[name] for name in expected.state()}, expected.state())


def test_more_steps_than_before_go_on() -> None:
    """A run is lengthened: without a rate that depends on its length it is what the longer run is."""
    asked = wanted(lr_scheduler=None, checkpoint=CheckpointSettings(every_epochs=99))
    keep(run_threads(asked))
    assert store.steps_of(Path(FOLDER)) == [7]
    longer = replace(asked, train=replace(asked.train, steps=9))
    assert equal(run_threads(longer, resumed=at(7)).state(), run_threads(longer).state())


def test_the_state_in_memory_is_what_was_stored() -> None:
    """Right after resuming, before any step: nothing is drawn anew, nothing left out."""
    asked = wanted("1f1b", 2, 2, 2, model=NORMED)
    keep(run_threads(replace(asked, train=replace(asked.train, steps=3))))
    taken: dict[int, dict[str, Tensor]] = {}

    def look(worker: Worker) -> None:
        taken[worker.world_rank] = {
            name: value.clone() for stage in worker.stages.values() for name, value in stage.state_dict().items()
        }

    shorter = run_threads(replace(asked, train=replace(asked.train, steps=3)))
    run_threads(asked, look, resumed=at(3))
    for rank, worker in shorter.workers.items():
        assert equal(taken[rank], {k: v for s in worker.stages.values() for k, v in s.state_dict().items()})
