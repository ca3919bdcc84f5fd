"""What a run that fails says: in one line, with the layer or the sample, and with advice that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import LIMIT_S, Engine, Said, engine, engine_process
from torch import nn

from engine.errors import a_type
from engine.launch.failure_report import FailureReport
from engine.pipeline.messages.boundary import Message, describe
from engine.plan.actions import Action, Op
from engine.telemetry import position
from engine.telemetry.position import EVALUATING, Place

__all__ = ["engine"]

CHANGING = '''
import torch
from torch import nn

class Changing(nn.Module):
    """A layer that hands on something else after {calls} calls in training."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), 0

    def forward(self, x):
        self.calls += self.training and not isinstance(x, torch._subclasses.FakeTensor)
        x = self.linear(x)
        if self.calls <= 2:
            return {usual}
        return {other}

class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 10)

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        return self.linear(x[:, :16])

def net(**_):
    return [("first", nn.Identity), ("odd", Changing), ("second", Second)]
'''
SMALL = (
    "data=synthetic", "data.shape=[16]", "train.steps=3", "train.global_batch_size=4", "pipeline.microbatches=2",
    "partition=uniform", "model.split=null",
)  # fmt: skip


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The same as `engine`, in a process of its own: what it starts goes with it."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Said:
        process = engine_process(list(arguments), tmp_path)
        out, err = process.communicate(timeout=LIMIT_S)
        return Said(process.returncode, out, err, tmp_path)

    return call


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "usual", "other", "differs", "advice"),
    [
        ("shape", "x", "torch.cat([x, x], 1)", "[2, 32] float32 instead of [2, 16] float32", "pad the samples"),
        ("dtype", "x", "x.double()", "[2, 16] float64 instead of [2, 16] float32", "convert the layer's output"),
        ("grad", "x", "x.detach()", "requires_grad False instead of True", "detach an output always or never"),
        ("nesting", "x", "(x, x)", "the structure (tensor, tensor) instead of tensor", "a fixed tuple or dictionary"),
        ("absent", "(x, x)", "(x, None)", "position 1: None instead of a tensor [2, 16]", "as a tensor of zeros"),
        ("constant", "(x, 1)", "(x, 2)", "position 1: 2 instead of 1", "as a tensor"),
        ("object", "(x, 1)", "(x, object())", "position 1: object instead of 1", "as a tensor"),
    ],
)
@pytest.mark.slow(keep=1)
def test_a_changed_boundary_names_the_layer_in_one_line_with_advice_that_fits(
    engine: Engine, name: str, usual: str, other: str, differs: str, advice: str
) -> None:
    module = f"changing_{name}"
    Path(f"{module}.py").write_text(CHANGING.format(calls=2, usual=usual, other=other))
    said = engine(
        f"model._target_={module}.net",
        *SMALL,
        "launch=threads",
        "eval.every=0",
        "partition=manual",
        "partition.split=[second]",
    )
    line = last_line(said.err)
    assert said.code == 1
    assert "layer 'odd', the last of stage 0, hands on something else than in the trial at start-up" in line
    assert differs in line and advice in line
    assert "in 0F0" in line and line.startswith("error: rank 0")


def test_a_structure_is_outlined_in_one_line_however_deep() -> None:
    nested = {"a": [torch.ones(1), (torch.ones(2),)], "b": None}
    found = Message(describe(torch.ones(1))).mismatch(nested)
    assert found is not None
    assert found.what == "the structure {'a': [tensor, (tensor,)], 'b': None} instead of tensor"
    found = Message(describe(nested)).mismatch({"a": torch.ones(1), "b": "x\ny" * 200})
    assert found is not None and "\n" not in str(found)


DATA = """
import torch
from torch.utils.data import Dataset

class Rows(Dataset):
    def __init__(self, fault, at=21, length=32, **_):
        self.fault, self.at, self.length = fault, at, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rows = torch.ones(16)
        if index == self.at:
            if self.fault == "raises":
                raise LookupError("no such\\nfile")
            if self.fault == "exits":
                raise SystemExit(3)
            if self.fault == "shape":
                rows = torch.ones(17)
        return rows, index % 10

class Batched(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]
"""


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.process)])
@pytest.mark.parametrize(
    ("kind", "fault", "says"),
    [
        ("Rows", "raises", "data: item 21 cannot be loaded: LookupError: no such"),
        ("Rows", "exits", "data: item 21 cannot be loaded: SystemExit: 3"),
        ("Rows", "shape", " and 21 cannot be put into one batch: RuntimeError: stack expects each tensor to be equal"),
        ("Batched", "raises", "cannot be loaded: LookupError: no such"),
    ],
)
@pytest.mark.slow(most=4)
def test_an_error_in_a_data_set_names_the_sample(
    engine: Engine, in_process: Engine, kind: str, fault: str, says: str, workers: int
) -> None:
    module = f"rows_{kind}_{fault}_{workers}"
    Path(f"{module}.py").write_text(DATA)
    call = in_process if workers else engine
    said = call(
        "model=mlp", "model.features=16", "data=synthetic", f"data._target_={module}.{kind}", f"+data.fault={fault}",
        "launch=threads", "train.global_batch_size=8", "train.epochs=1", "train.steps=null", f"data.workers={workers}",
        "eval.every=0",
    )  # fmt: skip
    assert said.code == 1, said.err
    assert "loading the samples of step" in said.err
    assert says in said.err and "21" in said.err
    assert "Original Traceback" not in last_line(said.err)


def test_a_place_tells_evaluation_from_training() -> None:
    action = Action(1, Op.F, 3)
    assert position.decode(action.pack()) == Place(1, 3, "1F3")
    assert position.decode(action.pack() | EVALUATING) == Place(1, 3, "1F3 of an evaluation")
    assert position.decode(position.NOWHERE) is None
    failures = FailureReport(ranks=2, world=2)
    failures.add_death(1, -11, position.decode(action.pack() | EVALUATING))
    assert failures.message() == "rank 1 (stage 1, micro-batch 3, in 1F3 of an evaluation) was killed by SIGSEGV"


DYING = """
import os, signal
from torch import nn

class Dying(nn.Linear):
    def forward(self, x):
        if not self.training and type(x) is not __import__("torch")._subclasses.FakeTensor:
            os.kill(os.getpid(), signal.SIGKILL) if {kill} else 1 / 0
        return super().forward(x)

def net(**_):
    return [("a", lambda: nn.Linear(16, 16)), ("b", lambda: Dying(16, 10))]
"""


@pytest.mark.process
def test_a_death_in_evaluation_says_so_and_sigkill_hints_at_memory(in_process: Engine) -> None:
    Path("dying_killed.py").write_text(DYING.format(kill=True))
    said = in_process("model._target_=dying_killed.net", *SMALL)
    assert said.code == 1
    line = last_line(said.err)
    assert line.startswith("error: rank 1 (stage 1, micro-batch 0, in 1F0 of an evaluation) was killed by SIGKILL (")
    assert "where memory runs out" in line


def test_an_error_in_evaluation_says_so(engine: Engine) -> None:
    Path("dying_raised.py").write_text(DYING.format(kill=False))
    said = engine("model._target_=dying_raised.net", *SMALL, "launch=threads")
    assert "in 1F0 of an evaluation) failed: ZeroDivisionError" in last_line(said.err)


@pytest.mark.parametrize(
    ("value", "said"), [(object(), "an object"), (1, "an int"), ([], "a list"), (None, "None"), (nn.Linear, "a type")]
)
def test_a_type_has_its_article(value: object, said: str) -> None:
    assert a_type(value) == said


ODD = """
import random
import torch
from torch import nn

class Odd(nn.Linear):
    def __init__(self, what):
        super().__init__(16, 16)
        self.what = what

    def forward(self, x):
        if self.what == "drawn" and torch.rand(1).item() < 0.5:
            return x
        if self.what == "python" and random.random() < 0.5:
            return x
        if self.what == "branch" and x.sum() > 0:
            return x
        if self.what == "mask":
            return super().forward(x)[x.sum(1) > -1e9]
        if self.what == "numpy":
            return super().forward(torch.from_numpy(x.detach().numpy()))
        return super().forward(x)

def net(what, **_):
    kind = {"lazy": lambda: nn.LazyLinear(16), "lazy norm": nn.LazyBatchNorm1d}.get(what, lambda: Odd(what))
    return [("first", lambda: nn.Linear(16, 16)), ("odd", kind), ("last", lambda: nn.Linear(16, 10))]

def empty(**_):
    return nn.Sequential()

def none(**_):
    return []
"""


@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        ("drawn", "to leave a layer out at random, draw a factor per sample"),
        ("branch", "compute both and select by torch.where"),
        ("mask", "or multiply by a mask"),
        ("numpy", "use torch's operators"),
        ("lazy", "A lazy layer finds out its sizes in its first forward, which here is no real one: give it its sizes"),
        ("lazy norm", "give it its sizes"),
    ],
)
@pytest.mark.slow(keep=2)
def test_a_layer_that_cannot_be_known_before_the_run_is_refused_with_the_remedy(
    engine: Engine, what: str, remedy: str
) -> None:
    Path("odd_layers.py").write_text(ODD)
    said = engine("model._target_=odd_layers.net", f"+model.what={what}", *SMALL, "launch=threads")
    assert said.code == 2
    line = last_line(said.err)
    assert line.startswith("error: layer 'odd' ") and remedy in line


def test_a_layer_left_out_by_pythons_own_generator_trains(engine: Engine) -> None:
    Path("odd_layers.py").write_text(ODD)
    said = engine("model._target_=odd_layers.net", "+model.what=python", *SMALL, "launch=threads", "train.steps=6")
    assert said.code == 0, said.err


@pytest.mark.parametrize(
    ("what", "said"), [("empty", "returned a Sequential without layers"), ("none", "returned an empty list")]
)
def test_a_model_without_layers_is_told_so(engine: Engine, what: str, said: str) -> None:
    Path("odd_layers.py").write_text(ODD)
    err = engine(f"model._target_=odd_layers.{what}", *SMALL, "launch=threads").err
    assert last_line(err).startswith(f"error: model._target_ odd_layers.{what} {said}")
