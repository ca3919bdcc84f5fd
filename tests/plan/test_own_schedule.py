"""A schedule is one file: this test writes one beside the others, and it is planned, proven and trained by its name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Engine, engine

from engine.plan import schedules
from engine.plan.schedules import SCHEDULES

__all__ = ["engine"]
NAME = "in_pairs"
SOURCE = '''
"""Two forwards, then their two backwards, on every rank."""

import numpy as np

from engine.plan.actions import Op, Placement, Program, pack
from engine.plan.schedules.registry import schedule


@schedule("in_pairs", "two micro-batches at a time", requires=lambda ranks, m: "take an even number" if m % 2 else None)
def in_pairs(ranks, microbatches):
    order = np.arange(microbatches).reshape(-1, 2)
    pairs = [np.hstack([pack(Op.F, rank, order), pack(Op.B, rank, order)]) for rank in range(ranks)]
    rows = tuple(pair.reshape(-1) for pair in pairs)
    return Program("in_pairs", Placement.linear(ranks), microbatches, rows)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(folder)])
    schedules.discover()
    yield NAME
    del SCHEDULES[NAME], sys.modules[f"{schedules.__name__}.{NAME}"], schedules.__dict__[NAME]


def test_a_file_beside_the_others_is_a_schedule(own: str, engine: Engine) -> None:
    said = engine(f"schedule.name={own}", "mode=plan", "pipeline.ranks=2", "pipeline.microbatches=4")
    assert said.code == 0, said.err
    plan = json.loads((said.runs[0] / "plan.json").read_text())
    assert plan["program"][1] == ["1F0", "1F1", "1B0", "1B1", "1F2", "1F3", "1B2", "1B3"]
    assert plan["makespan"] == 2 * (1 + 2 * 1 + 2 * 2 + 2)  # each pair: in, two forwards and two backwards, out
    assert [each["peak_in_flight"] for each in plan["per_rank"]] == [2, 2]


def test_it_trains(own: str, engine: Engine) -> None:
    small = ["model=mlp", "model.features=4", "model.hidden=8", "data=synthetic", "data.shape=[4]", "train.steps=2"]
    small += ["device=cpu", "launch=threads", "partition=uniform", "pipeline.microbatches=4", "eval.every=0"]
    losses = []
    for name in (own, "gpipe"):
        said = engine(*small, f"schedule.name={name}", f"hydra.run.dir=runs/{name}")
        assert said.code == 0, said.err
        losses.append(json.loads((said.folder / "runs" / name / "summary.json").read_text())["loss"])
    assert losses[0] == losses[1]  # bitwise: the same order of additions


def test_where_it_is_not_defined_its_own_words_are_the_refusal(own: str, engine: Engine) -> None:
    said = engine(f"schedule.name={own}", "mode=plan", "pipeline.microbatches=3")
    assert said.code != 0 and said.err.count("\n") == 1 and "take an even number" in said.err
