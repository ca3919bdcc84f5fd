"""Real runs of a user's own model that misbehaves where it is told to, for tests; `hurt` is a fixture."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import LIMIT_S, engine_process

GONE_S = 15.0  # the promise for everything a failed run has started
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "engine")

USER_CODE = '''
import multiprocessing, os, pathlib, shutil, signal, time
import torch
from torch import nn

class Second(nn.Module):
    """Writes its process id, then does in micro-batch 2 what it is told to."""
    def __init__(self, what):
        super().__init__()
        self.inner, self.what, self.calls = nn.Linear(8, 4), what, 0
        self.freeze("freeze at start")
    def freeze(self, what):
        if self.what == what and multiprocessing.current_process().name == "rank 1":
            os.kill(os.getpid(), signal.SIGSTOP)
    def forward(self, x):
        real = os.getppid() != 1 and type(x).__name__ != "FakeTensor"
        if real:
            new = pathlib.Path(f"pid.{os.getpid()}")
            new.write_text(str(os.getpid()))
            os.replace(new, "pid")
            if self.what == "raise" and self.calls == 2:
                raise ArithmeticError("the user's own mistake")
            if self.calls == 2:
                self.freeze("freeze in micro-batch 2")
            if self.what == "delete":
                shutil.rmtree("runs", ignore_errors=True)
            if self.what == "sleep":
                time.sleep(60)
            self.calls += 1
        return self.inner(x)

def model(what):
    return [("first", lambda: nn.Linear(8, 8)), ("second", lambda: Second(what))]

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.full((8,), float(i)), i % 4
'''

CONFIG = """
_target_: mine.model
what: nothing
loss: {_target_: torch.nn.CrossEntropyLoss}
split: [second]
"""
GIVEN = ["--config-dir", "conf_mine", "model=own", "data=own", "train.global_batch_size=16", "train.steps=3"]
DATA = "_target_: mine.Data\nworkers: 0\npin_memory: false\nshuffle: true\n"


class Run:
    """`python -m engine` in a folder with a user's own model; finds every process that it led to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"ENGINE_TEST={uuid.uuid4()}"
        (folder / "mine.py").write_text(USER_CODE)
        for group, name, text in (("model", "own", CONFIG), ("data", "own", DATA)):
            (folder / "conf_mine" / group).mkdir(parents=True)
            (folder / "conf_mine" / group / f"{name}.yaml").write_text(text)
        self.process: subprocess.Popen[str]

    def start(self, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        name, _, value = self.mark.partition("=")
        os.environ[name] = value
        try:
            self.process = engine_process([*GIVEN, *arguments], self.folder, *prefix)
        finally:
            del os.environ[name]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    def run(self, *arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, str, str]:
        self.start(*arguments, prefix=prefix)
        return self.end()

    def pid_of_second(self) -> int:
        """The process that holds stage 1, once it is in its first forward."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.folder / "pid").exists():
            assert time.monotonic() < deadline and self.process.poll() is None, self.end()
            time.sleep(0.05)
        return int((self.folder / "pid").read_text())

    def file(self, name: str) -> str:
        (path,) = self.folder.glob(f"runs/*/*/{name}")
        return path.read_text()

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.file("summary.json")))

    def left(self) -> dict[int, str]:
        """Processes of this run that are still there."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, PermissionError):
                continue
        return found

    def assert_gone(self, within_s: float = GONE_S) -> None:
        deadline = time.monotonic() + within_s
        while left := self.left():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)


@pytest.fixture
def hurt(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for pid in run.left():
        os.kill(pid, signal.SIGKILL)
    if hasattr(run, "process"):
        run.process.communicate()


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]
