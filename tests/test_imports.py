"""The borders between the parts, read from every import statement, and a few other rules of the house."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"engine", "models", "conf"}
MAX_LINES = 400

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
HOUSE = ARCHITECTURE.partition("<!-- rooms -->")[2].partition("<!-- /rooms -->")[0]
LIBRARIES = ARCHITECTURE.partition("| library | rooms |")[2].partition("\n\n")[0]
# File -> the one library that it may import all the same.
EXEMPT = {"engine.report.tensorboard.board": "torch.utils.tensorboard"}


class Place(NamedTuple):
    """Where a room is drawn: on which floor of the three, in which tower, how far down."""

    floor: int
    tower: int
    row: int

    def above(self, other: Place) -> bool:
        """Whether a room here may use one there."""
        if self.floor != other.floor:
            return self.floor < other.floor
        return self.tower == other.tower and self.row < other.row


def drawn(house: str) -> dict[str, Place]:
    """The drawing as a table: room or file directly below engine/ -> its place."""
    places: dict[str, Place] = {}
    floor = 0
    for row, line in enumerate(house.splitlines()):
        floor += line.strip().startswith("-----")
        for tower, part in enumerate(line.split("|")):
            for name in re.match(r"\s*((?:[\w]+(?:/|\.py) *)*)", part)[1].split():  # type: ignore[index]
                places[name.removesuffix("/").removesuffix(".py")] = Place(floor, tower, row)
    return places


PLACES = drawn(HOUSE)
ALLOWED_LIBRARIES = {
    library: set(re.findall(r"`(\w+)`", rooms.partition(";")[0]))
    for libraries, rooms in re.findall(r"^\| (.*) \| (.*) \|$", LIBRARIES, re.MULTILINE)
    for library in re.findall(r"`(\w+)`", libraries)
}


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def room_of(module: str) -> str:
    """`engine.plan.verify` -> plan, `models.gpt` -> models, `engine` -> engine."""
    parts = module.split(".")
    return parts[1] if parts[0] == "engine" and len(parts) > 1 else parts[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every module that `source` imports, at any depth; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
                base = ".".join([*up, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"importlib.import_module", "__import__"}:
            # A computed name (a user's `_target_`) cannot be read; a literal one is an import like any other.
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What in the file goes against the drawing or the table of libraries, a line each."""
    mine, found = room_of(module), []
    for name in imports(source, module, is_package):
        top = name.split(".")[0]
        if top in OURS:
            theirs = room_of(name)
            if theirs == mine or (module == "engine" and theirs in {"distributed", "pipeline"}):  # its names are theirs
                continue
            if mine not in PLACES or theirs not in PLACES or not PLACES[mine].above(PLACES[theirs]):
                found.append(f"{module} imports {name}, which is not drawn below {mine}")
        elif top in ALLOWED_LIBRARIES and mine not in ALLOWED_LIBRARIES[top]:
            exempt = EXEMPT.get(module)
            if exempt is None or not within(name, exempt):
                found.append(f"{module} imports {name}, which {mine} must not")
    return found


SOURCES = sorted(path for part in OURS for path in (ROOT / part).rglob("*.py"))


@pytest.mark.slow
def test_imports_keep_to_the_borders() -> None:
    found = [
        line for path in SOURCES for line in violations(path.read_text(), module_name(path), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_every_room_is_drawn_and_has_a_sentence_on_its_door() -> None:
    folder = ROOT / "engine"
    rooms = {path.parent.name for path in folder.glob("*/__init__.py")}
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert set(PLACES) == rooms | files
    doors = list(folder.rglob("__init__.py"))
    assert not [path for path in doors if not ast.get_docstring(ast.parse(path.read_text()))]


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    """Also in a circle, also inside functions. A package and what lies in it may: its names are theirs."""
    known = {module_name(path): path for path in SOURCES}
    needs: dict[str, set[str]] = {}
    for module, path in known.items():
        needs[module] = set()
        for name in imports(path.read_text(), module, path.name == "__init__.py"):
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and known[name].name != "__init__.py" and path.name != "__init__.py":
                needs[module].add(name)
    order = TopologicalSorter(needs)
    order.prepare()  # raises CycleError, which names them


@pytest.mark.parametrize(
    ("module", "source", "good"),
    [
        ("engine.plan.verify", "from engine.plan.actions import Op", True),
        ("engine.plan.verify", "import torch.nn as nn", False),
        ("engine.plan.verify", "def f():\n    from engine.job import Job", False),
        ("engine.plan.schedules.gpipe", "from ..actions import Op", True),
        ("engine.plan.schedules.gpipe", "from ...launch import launch", False),
        ("engine.plan.schedules.gpipe", "from .. import actions", True),
        ("engine.training.worker", "import omegaconf", False),
        ("engine.training.worker", "if True:\n    from torch.utils import tensorboard", True),
        ("engine.training.worker", "import importlib\nimportlib.import_module('hydra')", False),
        ("engine.training.worker", "from engine.report.tensorboard import board", False),
        ("engine.training.worker", "from engine.launch import rank", False),
        ("engine.training.worker", "from engine.pipeline.executor import Executor", True),
        ("engine.training.worker", "import torch", True),
        ("engine.pipeline.executor", "from engine.training.worker import Worker", False),
        ("engine.report.tensorboard.board", "from torch.utils.tensorboard import SummaryWriter", True),
        ("engine.report.tensorboard.board", "import torch", False),
        ("engine.report.pictures.timeline", "from torch.utils.tensorboard import SummaryWriter", False),
        ("engine.report.text", "from engine.account import bubble", True),
        ("engine.account.bubble", "from engine.report import text", False),
        ("engine.account.bubble", "from engine.transport import Channel", False),
        ("engine.account.bubble", "from engine.telemetry.records import Record", True),
        ("engine.collectives.allreduce.ring", "from engine.transport import Channel", True),
        ("engine.collectives.allreduce.ring", "from engine.pipeline import executor", False),
        ("engine.errors", "from engine.settings import Settings", False),
        ("engine.job", "from engine.settings import Settings", True),
        ("engine.newfile", "import hydra", False),
        ("engine.newfile", "from engine.plan import actions", False),
        ("engine.cli.main", "import hydra\nfrom engine.launch import launch\nfrom engine.report import compare", True),
        ("engine", "from engine import distributed", True),
        ("engine", "from engine.pipeline.pipeline import Pipeline", True),
        ("engine", "from engine.launch import launch", False),
        ("models.resnet", "from torch import nn", True),
        ("models.resnet", "from models import data", True),
        ("models.resnet", "from engine.targets import locate", False),
    ],
)
def test_the_rule_itself(module: str, source: str, good: bool) -> None:
    assert (not violations(source, module)) is good


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert list(imports("from . import gpipe\nfrom ..text import x", "engine.plan.schedules", True)) == [
        "engine.plan.schedules.gpipe",
        "engine.plan.text.x",
    ]


def test_files_stay_short() -> None:
    lengths = {module_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def unpickling(source: str) -> list[str]:
    """The calls in `source` that may run code from bytes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        wrong = called in {"pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.loads"}
        wrong |= called.endswith(("recv_object_list", "broadcast_object_list", "all_gather_object"))
        if called == "torch.load":
            wrong |= not any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
        found += [f"line {node.lineno}: {called}"] * wrong
    return found


def test_nothing_that_was_sent_or_stored_is_unpickled() -> None:
    """Nothing here may run code from bytes."""
    names = {module_name(path): path for path in SOURCES if within(module_name(path), "engine")}
    found = {name: unpickling(path.read_text()) for name, path in names.items()}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("source", "good"),
    [
        ("pickle.loads(b)", False),
        ("torch.distributed.broadcast_object_list(x)", False),
        ("torch.load(f)", False),
        ("torch.load(f, weights_only=False)", False),
        ("torch.load(f, weights_only=True)", True),
        ("json.loads(b)", True),
    ],
)
def test_what_unpickles_is_seen(source: str, good: bool) -> None:
    assert (not unpickling(source)) is good


PRIVATE = [
    re.compile(r"(?<![\w.~/$}])/(home|root|work|opt|Users|mnt|srv)/\w"),  # a path of somebody's machine
    re.compile(r"https?://[\w.-]*(pypi|pythonhosted|/simple)\b|\b(extra-)?index-url\b|\bfind-links\s*="),
]


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    return [name for name in listed.stdout.split("\0") if name]


def test_tracked_files_name_no_machine_and_no_registry() -> None:
    names = tracked()
    if not names:
        pytest.skip("not a git checkout")
    found = []
    for name in names:
        try:
            lines = (ROOT / name).read_text().splitlines()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        if name == "tests/test_imports.py":
            continue
        found += [
            f"{name}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if any(p.search(line) for p in PRIVATE)
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["see /home/ann/x", "'/root/y'", "--extra-index-url z", "https://pypi.org/simple"])
def test_private_patterns_match(text: str) -> None:
    assert any(pattern.search(text) for pattern in PRIVATE)


def test_no_module_hides_a_public_name() -> None:
    """Importing engine.NAME sets the attribute NAME of engine: it would take the place of a function of that name."""
    import engine

    assert not set(engine.__all__) & {path.stem for path in (ROOT / "engine").iterdir()}
