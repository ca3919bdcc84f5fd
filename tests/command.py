"""The command line in this process and in processes of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from engine.cli import main as cli
from engine.cli import run
from engine.launch.failure_report import Outcome
from engine.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60.0  # a hang, not a promise


@dataclass
class Said:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def runs(self) -> list[Path]:
        """Run folders, those of a sweep's jobs too."""
        return sorted(path.parent for path in self.folder.glob("runs/**/.hydra"))

    @property
    def config(self) -> dict[str, object]:
        return dict(yaml.safe_load((self.runs[0] / ".hydra" / "config.yaml").read_text()))


Engine = Callable[..., Said]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Engine:
    """`engine(key=value, ...)` runs the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["engine", *arguments])
        code = cli.main()
        out, err = capfd.readouterr()
        return Said(code, out, err, tmp_path)

    return call


def engine_process(arguments: list[str], folder: Path, *prefix: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("HYDRA_FULL_ERROR", None)
    command = [sys.executable, *(prefix or ("-m", "engine")), *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, str, str]]:
    """Calls of `run.train`, which does nothing here."""
    calls: list[tuple[Settings, str, str]] = []

    def train(settings: Settings, start_dir: str, run_dir: str) -> Outcome:
        calls.append((settings, start_dir, run_dir))
        return Outcome("completed")

    monkeypatch.setattr(run, "train", train)
    return calls
