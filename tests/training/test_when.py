"""When a run evaluates and traces: before its first step, and never."""

from __future__ import annotations

import json

import command
import pytest
from command import Engine

engine = command.engine  # a fixture
SMALL = ("launch=threads", "model=mlp", "data=synthetic", "train.steps=2", "train.global_batch_size=8")
SMALL += ("model.features=16", "model.hidden=8", "data.shape=[16]", "data.samples=32", "hydra.run.dir=run")


@pytest.mark.parametrize(("given", "evaluated"), [
    (("eval.at_start=true",), [0, 2]),
    (("eval.at_start=true", "eval.every=1"), [0, 1, 2]),
    (("eval.at_start=true", "eval.every=0"), [0]),
    (("eval.at_start=true", "schedule=pipedream", "pipeline.microbatches=2"), [0, 2]),
    (("eval.at_start=true", "data_parallel.replicas=2", "data_parallel.mode=async", "allreduce=parameter_server",
      "pipeline.microbatches=2"), [0, 2]),
])  # fmt: skip
def test_evaluation_before_the_first_step(engine: Engine, given: tuple[str, ...], evaluated: list[int]) -> None:
    said = engine(*SMALL, *given)
    assert said.code == 0, said.err
    lines = [line for line in said.out.splitlines() if "evaluation after" in line]
    assert [int(line.partition("evaluation after ")[2].split()[0]) for line in lines] == evaluated


def test_it_changes_nothing_of_the_training(engine: Engine) -> None:
    losses = []
    for number, start in enumerate(("true", "false")):
        said = engine(*SMALL, "model.dropout=0.5", f"eval.at_start={start}", f"hydra.run.dir=run{number}")
        assert said.code == 0, said.err
        losses.append(json.loads((said.folder / f"run{number}" / "summary.json").read_text())["loss"])
    assert losses[0] == losses[1]


def test_no_step_is_ever_traced(engine: Engine) -> None:
    said = engine(*SMALL, "trace.every=0")
    assert said.code == 0, said.err
    summary = json.loads((said.folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["traced_steps"] == 0 and summary["bubble"]["measured"] is None
    assert "No step was traced: set trace.every=1" in (said.folder / "run" / "report.txt").read_text()
    assert not (said.folder / "run" / "trace.json").exists() and not (said.folder / "run" / "timeline.png").exists()
