"""What README and the documents say: every file they name exists, every key is one, the example runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.cli.config import CONF
from engine.settings import Settings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONFIG: dict[str, Any] = yaml.safe_load((CONF / "config.yaml").read_text())
CHOSEN = {name: choice for entry in CONFIG["defaults"] if isinstance(entry, dict) for name, choice in entry.items()}
GROUPS = {name: choice for name, choice in CHOSEN.items() if not name.startswith("override ")}
KEYS = re.findall(r"^\| `([a-z_.]+)`[^|]*\|(.*)\| `([^`]+)` \|$", README, re.MULTILINE)


def described(text: str) -> set[str]:
    """The paths of an indented tree: two more spaces are one folder deeper; a line may name several files."""
    paths: set[str] = set()
    above: list[str] = []
    for line in text.splitlines():
        if not (match := re.match(r"^    ( *)((?:[\w.]+/?(?: |$))+)", line)):
            above = above if line.startswith("    ") else []
            continue
        above = above[: len(match[1]) // 2]
        for name in match[2].split():
            paths.add("/".join([*above, name.rstrip("/")]))
        if match[2].split()[0].endswith("/"):
            above.append(match[2].split()[0].rstrip("/"))
    return paths


def test_a_tree_is_read_as_it_is_drawn() -> None:
    tree = "    a/\n      b.py c.py   both\n      d/    a folder\n        e\n    f.py    another\n"
    assert described(tree) == {"a", "a/b.py", "a/c.py", "a/d", "a/d/e", "f.py"}


@pytest.mark.slow(keep=240)
def test_trees_name_no_file_that_does_not_exist() -> None:
    tree = README[README.index("\n## Files") :].partition("\n## ")[2].partition("\n## ")[0]
    assert [path for path in described(tree) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_what_is_named_by_its_path_exists(name: str) -> None:
    """`tests/plan/test_verify.py`, `plan/verify.py`: from the checkout, or from engine/."""
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|md|png))`", (ROOT / name).read_text()))
    assert {path for path in named if not (ROOT / path).exists() and not (ROOT / "engine" / path).exists()} == set()


def test_the_table_of_keys_was_found() -> None:
    named = {key for key, _, _ in KEYS}
    sections = {"plan", *GROUPS, *Settings.__dataclass_fields__}
    assert sections <= {key.partition(".")[0] for key in named}


def configured(key: str) -> Any:
    """The default that the configuration has for a key, or the choice of a group."""
    if key in GROUPS:
        return "null" if GROUPS[key] is None else GROUPS[key]
    first, *rest = key.split(".")
    value = yaml.safe_load((CONF / first / f"{GROUPS[first]}.yaml").read_text()) if first in GROUPS else CONFIG[first]
    for part in rest:
        value = value[part]
    return "null" if value is None else value


def test_keys_and_their_defaults_are_those_of_the_configuration() -> None:
    for key, meaning, default in KEYS:
        assert (key, str(configured(key))) == (key, default)
        if key in GROUPS and key != "experiment":
            assert {path.stem for path in (CONF / key).glob("*.yaml")} <= set(re.findall(r"`(\w+)`", meaning)), key


@pytest.mark.process
@pytest.mark.slow
def test_the_example_of_a_users_own_files_runs(tmp_path: Path) -> None:
    files = re.findall(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert {name for name, _ in files} > {"my_model.py", "conf/model/tower.yaml"}
    for name, content in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    arguments = re.findall(r"^    path/to/scripts/run (.*)$", README, re.MULTILINE)
    assert len(arguments) == 1
    command = [sys.executable, "-m", "engine", *arguments[0].split(), f"hydra.run.dir={tmp_path / 'run'}"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    claimed = re.search(r"steps 76, samples 2400; loss 1\.103 -> ([\d.]+)", README)
    assert claimed
    assert summary["steps"] == 76
    assert summary["loss"]["last"] == pytest.approx(float(claimed[1]), abs=0.05)
    assert summary["evaluation"]["samples"] == 150
