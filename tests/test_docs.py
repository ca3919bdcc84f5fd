"""What README and docs say: every file, key and link they name exists, the example runs, README stays short."""

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
from engine.cli.help import composed_defaults, groups
from engine.settings import KEYS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_MODEL = (ROOT / "docs" / "own-model.md").read_text()
# A key that a page names: `train.steps`, `train.steps=3`; not a module, a file or a call.
KEY = re.compile(r"(?<![\w./+])(%s)((?:\.\w+)+)=" % "|".join(sorted({path.partition(".")[0] for path in KEYS})))  # noqa: UP031


def test_readme_is_for_the_first_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 1500


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(\s*([^)]+?)\s*\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        assert other.exists(), target
        assert not anchor or anchor in headings(other), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_by_its_path_exists(page: Path) -> None:
    """`tests/plan/test_verify.py`, `plan/verify.py`, `docs/tags.md`: from the checkout, or from engine/."""
    named = set(re.findall(r"`((?:\w+/)+[\w-]+\.(?:py|md|png))`", page.read_text()))
    assert {path for path in named if not (ROOT / path).exists() and not (ROOT / "engine" / path).exists()} == set()


def test_every_page_can_be_reached_from_readme() -> None:
    reached, front = {ROOT / "README.md"}, [ROOT / "README.md"]
    while front:
        page = front.pop()
        links = {(page.parent / link).resolve() for link in re.findall(r"\]\(\s*([^)#]+\.md)", page.read_text())}
        front += links - reached
        reached |= links
    assert reached == set(PAGES)


def configured(key: str) -> Any:
    """Whether the configuration has a key, in some choice of its group."""
    group, _, rest = key.partition(".")
    files = [CONF / group / f"{file.stem}.yaml" for file in (CONF / group).glob("*.yaml")] if group in groups() else []
    trees = [composed_defaults().get(group), *(yaml.safe_load(file.read_text()) for file in files)]
    return any(found(tree, rest.split(".")) for tree in trees)


def found(tree: Any, path: list[str]) -> bool:
    for name in path:
        if tree is None or name not in tree:
            return False
        tree = tree[name]
    return True


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_keys_that_pages_set_are_keys(page: Path) -> None:
    named = {section + rest for section, rest in KEY.findall(page.read_text())}
    mistakes = {"pipeline.rank", "model.tied"}  # shown as refused; a choice of model=gpt
    unknown = {key for key in named - mistakes - set(KEYS) if not configured(key)}
    assert unknown == set()


@pytest.mark.process
@pytest.mark.slow
def test_the_example_of_a_users_own_files_runs(tmp_path: Path) -> None:
    files = re.findall(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```", OWN_MODEL, re.DOTALL | re.MULTILINE)
    assert {name for name, _ in files} > {"my_model.py", "conf/model/tower.yaml"}
    for name, content in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    arguments = re.findall(r"^    path/to/scripts/run (.*)$", OWN_MODEL, re.MULTILINE)
    assert len(arguments) == 1
    command = [sys.executable, "-m", "engine", *arguments[0].split(), f"hydra.run.dir={tmp_path / 'run'}"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    claimed = re.search(r"steps 76, samples 2400; loss 1\.103 -> ([\d.]+)", OWN_MODEL)
    assert claimed
    assert summary["steps"] == 76
    assert summary["loss"]["last"] == pytest.approx(float(claimed[1]), abs=0.05)
    assert summary["evaluation"]["samples"] == 150
