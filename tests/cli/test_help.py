"""`--help` and the table of keys that it, the checks and docs/configuration.md are made from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from command import ROOT

from engine.cli.config import CONF, _check_key
from engine.cli.help import default, groups, meaning
from engine.settings import KEYS, Key


def leaves(tree: Any, above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        path = f"{above}{name}"
        yield from leaves(value, f"{path}.") if isinstance(value, dict) else [path]


def test_every_key_of_the_configuration_has_a_row() -> None:
    written = yaml.safe_load((CONF / "config.yaml").read_text())
    written.pop("defaults"), written.pop("hydra")
    assert set(leaves(written)) <= set(KEYS)


def test_every_key_means_something_in_a_plain_line() -> None:
    for path, key in KEYS.items():
        assert len(key.meaning) > 10 and "\n" not in key.meaning and "|" not in key.meaning, path


@pytest.mark.parametrize("path", [path for path in KEYS if path not in groups() and path != "plan.costs"])
def test_help_lists_the_key_with_its_default_and_meaning(path: str, help_text: str) -> None:
    shown = f"{path}={default(path)}" if default(path) else path
    assert f"\n{shown} " in help_text or f"\n{shown}\n" in help_text
    assert " ".join(meaning(KEYS[path]).split()) in " ".join(help_text.split())


@pytest.fixture(scope="module")
def help_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `--help` prints to a user who has a configuration folder, without importing torch."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine" / "model").mkdir(parents=True)
    (folder / "mine" / "model" / "tower.yaml").write_text("_target_: a.b\n")
    command = [sys.executable, "-X", "importtime", "-m", "engine", "--config-dir", "mine", "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=60)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hydra" in imported and "torch" not in imported
    assert [path.name for path in folder.iterdir()] == ["mine"]
    return done.stdout


def test_help_lists_groups_a_users_own_among_them(help_text: str) -> None:
    assert (
        "\nmodel: bert, gpt, gpt2, llama, lstm, mamba, mlp, resnet50, sleep, t5, tower, translator, unet, vit\n"
        in help_text
    )


def test_defaults_are_what_a_run_gets() -> None:
    expected = {
        "seed": "0", "pipeline.ranks": "2", "train.accumulate": "1", "data.shuffle": "true", "eval.every": "null",
        "model.split": "[layer4]", "schedule.chunks": "", "schedule": "gpipe", "experiment": "null",
        "plan.compare": "[]",
    }  # fmt: skip
    assert {path: default(path) for path in expected} == expected


@pytest.mark.parametrize(
    ("key", "right", "wrong", "said"),
    [
        (Key("a word of two", choices=("one", "two")), "two", "three", "no such choice"),
        (Key("a word to come", choices=("one",), later=("two",)), "one", "two", "not part of the engine yet"),
        (Key("at least", at_least=2), 2, 1, "must be at least 2"),
        (Key("above", above=0), 0.5, 0, "must be above 0"),
        (Key("at most", at_most=10), None, 11, "must be at most 10"),
        (Key("typed", kind=bool), True, "yes", "is not true or false"),
    ],
)
def test_a_row_is_all_that_a_new_key_needs_to_be_checked(
    key: Key, right: Any, wrong: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KEYS, "train.new", key)
    _check_key("train.new", key, right)
    with pytest.raises(ValueError, match=f"train.new={wrong}.* {said}"):
        _check_key("train.new", key, wrong)
