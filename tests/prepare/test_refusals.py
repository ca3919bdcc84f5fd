"""What only the model, the data set or the optimizer can tell is wrong: refused all the same before anything starts.

Everything is built in the parent, on fake tensors or with one parameter, so each of these ends with the bad value, what
would be right, exit code 2 and no worker. What is refused without importing torch is in `test_cli.py`.
"""

from __future__ import annotations

import json

import command
import pytest
from command import Engine

from engine.cli import run
from engine.launch import launch
from engine.launch.failure_report import Outcome

engine = command.engine  # a fixture
MLP = ["model=mlp", "data=synthetic", "data.shape=[16]", "model.features=16", "data.samples=32"]
GPT = ["model=gpt", "data=text", "data.max_bytes=4000"]
SLEEP = ["model=sleep", "data=synthetic"]
MANUAL = ["partition=manual"]

WRONG = {
    "+model.wdth=2": (MLP, ["model.wdth", "hidden"]),
    "model.features=0": (MLP, ["model.features=0"]),
    "model.hidden=0": (MLP, ["model.hidden=0", "at least 1"]),
    "model.hidden=-3": (MLP, ["model.hidden=-3", "at least 1"]),
    "model.classes=0": (MLP, ["model.classes=0", "at least 1"]),
    "model.depth=abc": (MLP, ["model.depth=abc must be a whole number (by default 4) for models.mlp.mlp"]),
    "model.features=x": (MLP, ["model.features=x must be a whole number (by default 64)"]),
    "model.features=null": (MLP, ["model.features=null must be a whole number"]),
    "model.hidden=2.5": (
        MLP,
        ["model.hidden=2.5 must be a whole number (by default 64)", "'hidden.0' cannot be built"],
    ),
    "model.dropout=[0.1]": (MLP, ["model.dropout=[0.1] must be a number (by default 0.0)"]),
    "+model.loss.label_smoothing=x": (MLP, ["model.loss.label_smoothing=x must be a number (by default 0.0)"]),
    "model.width=wide": (SLEEP, ["model.width=wide must be a whole number (by default 16) for models.sleep.sleep"]),
    "data.samples=many": (MLP, ["data.samples=many must be a whole number (by default 1024)"]),
    "data.shape=x": (MLP, ["data.shape=x must be a list of whole numbers (by default [64])", "Synthetic"]),
    "data.shape=[x]": (MLP, ["data.shape=[x] must be a list of whole numbers"]),
    "data.path=[a]": (GPT, ["data.path=[a] must be a word or null for models.data.Text"]),
    "optimizer.momentum=x": ([*MLP, "optimizer=sgd"], ["optimizer.momentum=x must be a number (by default 0)"]),
    "optimizer.betas=3": (
        [*MLP, "optimizer=adam"],
        ["optimizer.betas=3 must be a list of numbers (by default [0.9,0.999])"],
    ),
    "model.activation=rely": (MLP, ["model.activation=rely", "relu"]),
    "model.features=100": (MLP, ["model.features=100", "16"]),
    "pipeline.ranks=7": (MLP, ["7 stages", "6 layers"]),
    "model.layers=-1": (GPT, ["model.layers=-1"]),
    "model.heads=0": (GPT, ["model.heads=0", "at least 1"]),
    "model.vocabulary=0": (GPT, ["model.vocabulary=0", "at least 1"]),
    "model.context=16": (GPT, ["128 tokens", "context of 16"]),
    "data.path=nowhere": (GPT, ["data.path=nowhere", "no such file"]),
    "model.width=0": (["model=resnet50"], ["model.width=0", "at least 1"]),
    "model.forward_ms=-1": (SLEEP, ["model.forward_ms=-1", "milliseconds"]),
    "model.forward_ms=[1,fast]": (SLEEP, ["model.forward_ms", "milliseconds"]),
    "partition.split=[hiden.2]": ([*MLP, *MANUAL], ["hiden.2", "did you mean 'hidden.2'"]),
    "partition.split=[hidden.1,hidden.2]": ([*MLP, *MANUAL], ["makes 3 stages", "has 2"]),
    "partition.split=[input]": ([*MLP, *MANUAL], ["'input' is the first layer"]),
    "partition.split=null": ([*MLP, *MANUAL], ["partition.split"]),
    "model.split=[nothing]": (MLP, ["nothing", "hidden.2"]),
    "optimizer.lr=abc": (MLP, ["optimizer.lr=abc", "finite number"]),
    "optimizer.lr=-1": (MLP, ["learning rate: -1", "torch.optim.Adam"]),
    "+optimizer.lerning_rate=1": (MLP, ["optimizer.lerning_rate", "betas"]),
    "optimizer._target_=torch.optim.SDG": (MLP, ["torch.optim.SDG", "SGD"]),
    "lr_scheduler.T_max=abc": (
        [*MLP, "lr_scheduler=cosine"],
        ["lr_scheduler.T_max=abc must be a whole number", "Cosine"],
    ),
    "lr_scheduler.T_max=0": ([*MLP, "lr_scheduler=cosine"], ["T_max=0", "ZeroDivisionError"]),
    "model.loss=null": (MLP, ["model.loss", "_target_"]),
    "+model.loss.reductin=sum": (MLP, ["model.loss.reductin", "reduction"]),
    "+model.overlap=models.overlap.in_thread": (MLP, ["model.overlap", "is not a section", "model.overlap._target_"]),
    "+model.overlap._target_=models.overlap.in_thred": (MLP, ["models.overlap.in_thred", "in_thread"]),
    "+model.overlap._target_=torch.relu_": (MLP, ["model.overlap", "torch.relu_"]),
    "model._target_=models.mlp.mpl": (MLP, ["model._target_=models.mlp.mpl", "mlp"]),
    "data._target_=models.data.Synthtic": (MLP, ["models.data.Synthtic", "Synthetic"]),
    "data.samples=0": (MLP, ["data.samples=0", "at least 1"]),
    "+data.evaluation.smples=3": (MLP, ["data.evaluation.smples", "samples"]),
    "data.evaluation.split=held": (MLP, ["split=held", "train, test"]),
    "data_parallel.replicas=8": ([*MLP, "data.samples=5"], ["5 samples", "replicas=8"]),
    "model=gpt": (["data=digits"], ["no tokens", "data=text"]),
}


@pytest.mark.parametrize("override", WRONG)
@pytest.mark.slow(keep=1, most=40)
def test_refused_by_name_before_anything_starts(override: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    def start(*arguments: object) -> Outcome:
        started.append(arguments)
        return Outcome("completed")

    monkeypatch.setattr(launch, "launch", start)
    given, parts = WRONG[override]
    said = engine("launch=threads", "device=cpu", *given, override)
    assert said.code == run.REFUSED and not started, said.err
    assert said.err.startswith("error: ") and len(said.err.strip().splitlines()) == 1, said.err
    for part in parts:
        assert part in said.err, said.err
    (folder,) = said.runs
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert (folder / "error.txt").read_text() == said.err.removeprefix("error: ")
    assert not list(folder.glob("events*"))
