"""The borders between the parts, read from every import statement, and a few other rules of the house."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"engine", "models", "conf"}
MAX_LINES = 400

# Part -> what of ours it may import. A part is the longest entry that its module begins with.
ALLOWED = {
    "engine": set(),
    "engine.settings": set(),
    "engine.job": {"engine.plan", "engine.settings"},
    "engine.telemetry.records": {"engine.plan"},
    "engine.errors": set(),
    "engine.console": set(),
    "engine.cli.arguments": set(),
    "engine.annotations": set(),
    "engine.targets": {"engine.annotations", "engine.errors"},
    "engine.plan": set(),
    "engine.collectives": {"engine.transport"},
    "engine.runtime": {
        "engine.plan", "engine.collectives", "engine.errors", "engine.job", "engine.settings", "engine.telemetry.records",
        "engine.targets",
    },
    "engine.distributed": {
        "engine.collectives", "engine.errors", "engine.environment", "engine.transport.rendezvous",
        "engine.transport",
    },
    "engine.report": {"engine.console", "engine.job", "engine.plan", "engine.telemetry.records", "engine.settings"},
    "engine.tab": {"engine.plan", "engine.report"},  # what TensorBoard loads: the report's view of event files
    "engine.cli.limits": {"engine.settings", "engine.environment"},
    "engine.cli.config": {"engine.cli.limits", "engine.plan", "engine.settings"},
    "engine.cli.complaints": {"engine.cli.arguments", "engine.cli.config"},
    "engine.cli.composition": {"engine.cli.arguments", "engine.cli.config", "engine.targets"},
    "engine.run": {"engine"},
    "engine.cli": {"engine"},
    "engine.__main__": {"engine"},
    "models": set(),
    "conf": set(),
}  # fmt: skip

# Part -> libraries that it must not import. Only cli, complaints, composition, config and __main__ see Hydra.
HYDRA = {"hydra", "omegaconf"}
BOARD = {"tensorboard", "torch.utils.tensorboard"}
FORBIDDEN = {
    "engine": HYDRA | BOARD,
    "engine.plan": HYDRA | BOARD | {"torch"},
    "engine.report": HYDRA | {"torch"},
    "engine.tab": HYDRA | {"torch"},
    "engine.settings": HYDRA | BOARD | {"torch"},
    "engine.job": HYDRA | BOARD | {"torch"},
    "engine.telemetry.records": HYDRA | BOARD | {"torch"},
    "engine.cli": BOARD,
    "engine.cli.config": BOARD | {"torch"},
    "engine.cli.limits": HYDRA | BOARD | {"torch"},
    "engine.cli.complaints": BOARD | {"torch"},
    "engine.cli.composition": BOARD | {"torch"},
    "engine.cli.arguments": BOARD | {"torch"},
    "engine.errors": HYDRA | BOARD | {"torch"},
    "engine.annotations": HYDRA | BOARD | {"torch"},
    "engine.console": HYDRA | BOARD | {"torch"},
    "engine.__main__": BOARD,
    "models": HYDRA | BOARD,
    "conf": HYDRA | BOARD | {"torch"},
}
# File -> the one library that it may import all the same.
EXEMPT = {"engine.report.tensorboard.board": "torch.utils.tensorboard"}


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def part_of(module: str, table: dict[str, set[str]]) -> str:
    """The longest entry of `table` that `module` lies in."""
    return max((part for part in table if within(module, part)), key=len)


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
    """The rules of `ALLOWED` and `FORBIDDEN` that the file breaks, a line each."""
    mine, found = part_of(module, ALLOWED), []
    forbidden = FORBIDDEN[part_of(module, FORBIDDEN)]
    for name in imports(source, module, is_package):
        if name.split(".")[0] in OURS:
            home = mine if mine != "engine" else module
            if not any(within(name, part) for part in {home, *ALLOWED[mine]}):
                found.append(f"{module} imports {name}; {mine} may import only {sorted(ALLOWED[mine]) or 'itself'}")
        elif any(within(name, library) for library in forbidden):
            exempt = EXEMPT.get(module)
            if exempt is None or not within(name, exempt):
                found.append(f"{module} imports {name}; {mine} must not")
    return found


SOURCES = sorted(path for part in OURS for path in (ROOT / part).rglob("*.py"))


def test_imports_keep_to_the_borders() -> None:
    found = [
        line for path in SOURCES for line in violations(path.read_text(), module_name(path), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "good"),
    [
        ("engine.plan.verify", "from engine.plan.actions import Op", True),
        ("engine.plan.verify", "import torch.nn as nn", False),
        ("engine.plan.verify", "def f():\n    from engine.job import Job", False),
        ("engine.plan.schedules.gpipe", "from ..actions import Op", True),
        ("engine.plan.schedules.gpipe", "from ...runtime import launch", False),
        ("engine.plan.schedules.gpipe", "from .. import actions", True),
        ("engine.training.worker", "import omegaconf", False),
        ("engine.training.worker", "if True:\n    from torch.utils.tensorboard import SummaryWriter", False),
        ("engine.training.worker", "from torch.utils import tensorboard", False),
        ("engine.training.worker", "import importlib\nimportlib.import_module('hydra')", False),
        ("engine.training.worker", "from engine.report import board", False),
        ("engine.training.worker", "import torch", True),
        ("engine.report.tensorboard.board", "from torch.utils.tensorboard import SummaryWriter", True),
        ("engine.report.tensorboard.board", "import torch", False),
        ("engine.report.pictures.draw", "from torch.utils.tensorboard import SummaryWriter", False),
        ("engine.collectives.allreduce.ring", "from engine.transport import Channel", True),
        ("engine.collectives.allreduce.ring", "from engine.runtime import executor", False),
        ("engine.newfile", "import hydra", False),
        ("engine.newfile", "from engine.plan import actions", False),
        ("engine.cli", "import hydra\nfrom engine.runtime import launch", True),
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
