"""The command line before Hydra: flags anywhere, and what is refused in one line."""

from __future__ import annotations

import command
import pytest
from command import Engine
from hypothesis import given
from hypothesis import strategies as st

from engine.cli import run
from engine.cli.arguments import UsageError, flags_first

engine = command.engine  # a fixture

FLAGS = [
    ["-m"],
    ["--multirun"],
    ["--config-dir", "mine"],
    ["-cd", "mine"],
    ["--config-dir=mine"],
    ["--config-d", "mine"],
]
OVERRIDES = ["a=1", "+b=2", "~c", "d='x y'", "e=[1,-2]", "f=-3"]


@given(st.permutations([*FLAGS[:1], FLAGS[2], *([word] for word in OVERRIDES)]))
def test_flags_may_stand_anywhere(parts: list[list[str]]) -> None:
    found = flags_first([word for part in parts for word in part])
    flags = [word for part in parts for word in part if part in FLAGS]
    assert found == flags + [word for part in parts for word in part if part not in FLAGS]


@pytest.mark.parametrize("flag", FLAGS, ids="".join)
def test_a_flag_keeps_its_value(flag: list[str]) -> None:
    assert flags_first(["a=1", *flag, "b=2"]) == [*flag, "a=1", "b=2"]


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "+hydra.run.dir"])
@pytest.mark.parametrize("value", ["", "''", '""', "' '", "null", "None", "~"])
def test_a_folder_without_a_name_is_refused(key: str, value: str) -> None:
    with pytest.raises(UsageError, match="names no folder"):
        flags_first(["-m", f"{key}={value}"])


@pytest.mark.parametrize(
    "words", [["--foo"], ["a=1", "--multirum"], ["--config-dir"], ["-z", "a=1"], ["--cfg", "all of it"]]
)
def test_what_is_no_flag_is_refused_in_a_line(words: list[str], engine: Engine) -> None:
    said = engine(*words)
    assert said.code == run.REFUSED and said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    assert "--hydra-help" in said.err and said.out == "" and not said.runs


@pytest.mark.slow
def test_a_sweep_may_be_asked_for_last(engine: Engine) -> None:
    said = engine("mode=plan", "pipeline.ranks=1,2", "-m", "pipeline.microbatches=4")
    assert said.code == 0 and len(said.runs) == 2, said.err


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_refused_and_left_alone(engine: Engine) -> None:
    small = [
        "launch=threads",
        "model=mlp",
        "data=synthetic",
        "train.steps=1",
        "train.global_batch_size=8",
        "eval.every=0",
    ]
    small += ["model.features=16", "data.shape=[16]", "data.samples=32", "hydra.run.dir=runs/mine"]
    assert engine(*small).code == 0
    folder = run.Path("runs/mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    said = engine(*small, "train.steps=2")
    assert said.code == run.REFUSED and "holds a run already" in said.err, said.err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_keys_of_the_loader_need_no_plus(engine: Engine, tmp_path: run.Path) -> None:
    """A data set of one's own says nothing of the loader; its keys are there all the same."""
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / "mine" / "data" / "own.yaml").write_text("_target_: toys.Tokens\n")
    keys = ["data.workers=1", "data.shuffle=false", "data.pin_memory=false", "data.evaluation={samples: 8}"]
    said = engine("mode=plan", "--config-dir", "mine", "data=own", *keys)
    assert said.code == 0, said.err
    assert said.config["data"] == {
        "_target_": "toys.Tokens", "workers": 1, "shuffle": False, "pin_memory": False, "drop_last": False,
        "evaluation": {"samples": 8},
    }  # fmt: skip
