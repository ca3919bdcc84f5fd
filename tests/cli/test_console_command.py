"""The command `pipeline-engine`: what `python -m engine` does, with tab completion in bash."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import command
import pytest
from command import LIMIT_S, ROOT, Engine

import engine as package

engine = command.engine  # a fixture
SMALL = ("model=mlp", "data=synthetic", "train.steps=2", "train.global_batch_size=8", "model.features=16")
SMALL += ("model.hidden=8", "data.shape=[16]", "data.samples=32")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which the command is on the PATH, as an installer writes it from pyproject.toml."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        script = f"import sys\nfrom {module} import {function}\nif __name__ == '__main__':\n    {function}()\n"
        start = (
            f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n"  # as pip does: its path may have blanks
        )
        (folder / name).write_text(start + script)
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.process
@pytest.mark.slow
def test_it_trains_in_processes_and_finds_code_in_the_folder_it_is_started_from(
    environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "rate.py").write_text("import torch\ndef sgd(parameters): return torch.optim.SGD(parameters, lr=0.1)\n")
    words = ["pipeline-engine", *SMALL, "~optimizer", "+optimizer._target_=rate.sgd", "hydra.run.dir=run"]
    how = {"cwd": folder, "env": environment, "timeout": LIMIT_S, "capture_output": True, "text": True}
    done = subprocess.run(words, check=False, **how)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "run" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.slow
def test_bash_completes_by_tab(environment: dict[str, str], tmp_path: Path) -> None:
    """In a terminal, as somebody types it; COMP_WORDBREAKS as bash sets them."""
    assert typed(environment, tmp_path, "pipeline-engine schedule=loop\t").endswith(
        "pipeline-engine schedule=looped_bfs"
    )
    assert typed(environment, tmp_path, "pipeline-engine mode=plan pipeline.mi\t").endswith("pipeline.microbatches=")


def typed(environment: dict[str, str], folder: Path, keys: str) -> str:
    """The line that an interactive bash has after these keys."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], environment | {"PS1": "", "TERM": "dumb"})
    try:
        said(terminal, 'eval "$(pipeline-engine --shell-completion install=bash)"; echo "rea""dy"\n', r"(?m)^ready")
        os.write(terminal, keys.encode())
        line = said(terminal, "", r"looped_bfs|microbatches=") and "\x01echo 'line: \x05'\n"
        return said(terminal, line, r"(?m)^line: (.*)$")
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)


def said(terminal: int, keys: str, pattern: str) -> str:
    """Type, and wait until the terminal shows what matches; return its first group, or all of it."""
    os.write(terminal, keys.encode())
    text, end = "", time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65536).decode().replace("\r", "")
        if found := re.search(pattern, text):
            return found.group(found.lastindex or 0)
    raise AssertionError(f"not seen in {text!r}: {pattern}")


@pytest.mark.parametrize("flag", ["--version", "--vers"])
def test_the_version_is_the_engines(engine: Engine, flag: str) -> None:
    said = engine(flag)
    assert said.code == 0 and said.out.startswith(f"pipeline-engine {package.__version__} (hydra-core 1."), said.out
    assert list(said.folder.iterdir()) == []


def help_lines(engine: Engine, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What `--help` prints."""
    with pytest.raises(SystemExit) as ended:
        engine("--help")
    assert ended.value.code == 0
    return capfd.readouterr().out.splitlines()


def test_help_says_what_it_is_for_and_how_to_complete(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    lines = help_lines(engine, capfd)
    assert lines[0].startswith("Train a model cut into pipeline stages")
    assert 'Tab completion in bash: eval "$(pipeline-engine --shell-completion install=bash)"' in lines


def test_what_help_shows_is_accepted(engine: Engine, trained: list[object], capfd: pytest.CaptureFixture[str]) -> None:
    """The examples that need no file of the user's, as a shell would split them."""
    shown = [line.strip() for line in help_lines(engine, capfd) if line.startswith("  pipeline-engine")]
    commands = [line.partition("    ")[0] for line in shown if "FOLDER" not in line and "--config-dir" not in line]
    assert len(commands) == 4
    for words in map(shlex.split, commands):
        said = engine(*words[1:])
        assert said.code == 0, said.err
    assert len(trained) == 1 + 4 + 1


trained = command.trained  # a fixture
