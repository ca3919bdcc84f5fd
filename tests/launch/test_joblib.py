"""Sweeps whose jobs joblib runs side by side: they train in processes of their own, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import LIMIT_S, engine_process

JOBLIB = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "model=mlp", "schedule=gpipe,1f1b")
MODEL = """
import torch
from torch import nn

class Failing(nn.Linear):
    def forward(self, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            raise RuntimeError("the model's own mistake")
        return super().forward(x)

def net(**_):
    return [("a", lambda: nn.Linear(16, 16)), ("b", lambda: Failing(16, 10))]
"""


def left() -> set[str]:
    """joblib's semaphores and folders."""
    return {path.name for path in Path("/dev/shm").iterdir() if "loky" in path.name or "joblib" in path.name}


def assert_gone(before: set[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while left() - before and time.monotonic() < deadline:  # joblib's tracker ends a moment after its parent
        time.sleep(0.1)
    assert left() <= before


pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /dev/shm"),
    pytest.mark.timeout(240),
]


@pytest.mark.parametrize("launch", ["processes", "threads"])
@pytest.mark.slow(most=1)
def test_jobs_of_joblib_train_and_leave_nothing(launch: str, tmp_path: Path) -> None:
    before = left()
    process = engine_process([*JOBLIB, "train.steps=2", f"launch={launch}"], tmp_path)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 0, err
    assert out.count("completed: ") == 2 and "not waited for" not in err
    assert_gone(before)


def test_jobs_of_joblib_that_fail_say_why_and_leave_nothing(tmp_path: Path) -> None:
    before = left()
    (tmp_path / "failing_net.py").write_text(MODEL)
    own = ("model._target_=failing_net.net", "data=synthetic", "data.shape=[16]", "partition=uniform", "train.steps=2")
    process = engine_process([*JOBLIB, *own], tmp_path)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 1
    assert out.count("failed: RuntimeError: the model's own mistake") == 2, out + err
    assert "`_target_`" not in err
    assert_gone(before)


def test_an_interrupted_sweep_of_joblibs_leaves_nothing(tmp_path: Path) -> None:
    before = left()
    process = engine_process([*JOBLIB, "train.steps=100000"], tmp_path)
    deadline = time.monotonic() + LIMIT_S
    while len([*tmp_path.glob("runs/**/plan.json")]) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert_gone(before)
    ours = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert ours.stdout == ""
