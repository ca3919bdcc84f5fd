"""An all-reduce is one file and one row: this file makes one, registers it, and trains with it by its name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from command import Engine, engine
from torch import Tensor

from engine.allreduces import ALLREDUCES, AllReduceInfo
from engine.collectives import COLLECTIVES, Collective, ReduceOp
from engine.collectives.allreduce.auto import CANDIDATES
from engine.collectives.allreduce.costs import ALGORITHMS, LinkCosts, Terms, cheapest
from engine.collectives.peers import mesh, wait_all
from engine.transport import Edge

__all__ = ["engine"]
CONF = Path(__file__).parents[2] / "conf" / "allreduce"
SUMS: list[int] = []


class EveryoneToEveryone(Collective):
    """Each member sends all it has to each other one, and adds what comes in the members' order."""

    @classmethod
    def edges(cls, members: Sequence[int], label: str) -> list[Edge]:
        size = len(members)
        return mesh(members, [(a, b) for a in range(size) for b in range(size) if a != b], label)

    def _reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        SUMS.append(tensor.numel())
        others = [position for position in range(self.peers.size) if position != self.position]
        parts = {position: tensor.clone() for position in range(self.peers.size)}
        arriving = [self.peers.recv(position, parts[position]) for position in others]
        wait_all([*(self.peers.send(position, parts[self.position]) for position in others), *arriving])
        tensor.copy_(parts[0])
        for position in range(1, self.peers.size):
            op.combine(tensor, parts[position], out=tensor)


def cost(size: int) -> Terms:
    return Terms(float(size > 1), size - 1, size - 1)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> AllReduceInfo:
    info = AllReduceInfo(
        "everyone_to_everyone",
        "everybody sends all to everybody",
        f"{__name__}:EveryoneToEveryone",
        f"{__name__}:cost",
        auto=True,
    )
    monkeypatch.setitem(ALLREDUCES, info.name, info)
    SUMS.clear()
    return info


SMALL = ["model=mlp", "data=synthetic", "data.shape=[4]", "model.features=4", "model.hidden=8", "train.steps=2"]
SMALL += ["eval.every=0", "device=cpu", "launch=threads", "pipeline.ranks=1", "pipeline.microbatches=2"]
SMALL += ["data_parallel.replicas=3"]


def test_a_run_sums_with_it_by_name(own: AllReduceInfo, engine: Engine) -> None:
    said = engine(*SMALL, f"allreduce.name={own.name}", "hydra.run.dir=runs/a")
    assert said.code == 0, said.err
    assert len(SUMS) >= 2 * 3
    said = engine(*SMALL, "allreduce=ring", "hydra.run.dir=runs/b")
    mine, theirs = (json.loads((folder / "summary.json").read_text()) for folder in said.runs)
    assert mine["loss"]["last"] == pytest.approx(theirs["loss"]["last"], rel=1e-5)
    assert mine["allreduce"]["name"] == own.name


def test_it_is_in_every_list_that_the_row_says(own: AllReduceInfo) -> None:
    assert COLLECTIVES[own.name] is EveryoneToEveryone and own.name in CANDIDATES
    assert ALGORITHMS[own.name](4) == Terms(1, 3, 3)
    latency, bandwidth = LinkCosts(1e-3, 1e-12, 0.0), LinkCosts(1e-12, 1e-9, 0.0)
    assert cheapest(CANDIDATES, 4, 1000, latency) == own.name
    assert cheapest(CANDIDATES, 4, 1000, bandwidth) == "halving_doubling"


def test_a_name_that_is_no_row_is_refused_with_the_rows(own: AllReduceInfo, engine: Engine) -> None:
    said = engine(*SMALL, "allreduce.name=everyone_to_everybody", "mode=plan")
    assert said.code != 0 and said.err.count("\n") == 1 and f"did you mean {own.name}?" in said.err


@pytest.mark.parametrize("name", ALLREDUCES)
def test_every_row_is_a_choice_of_the_group(name: str) -> None:
    keys = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert keys["name"] == name and ("group_size" in keys) == ALLREDUCES[name].grouped
    assert sorted(path.stem for path in CONF.iterdir()) == sorted(ALLREDUCES)
