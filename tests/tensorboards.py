"""TensorBoard as a user starts it: the installed command in a process of its own, our entry point found by itself."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import recorded
from recorded import MS, costs, measured, recorder, step_records

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of tensorboard's own imports
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[1]
LIMIT_S = 60.0  # a hang, not a promise


@contextmanager
def tensorboard(logdir: Path, aside: Path, *arguments: str) -> Iterator[str]:
    """The address of a TensorBoard on `logdir`, on loopback and a port of the system's choice.

    `aside`: an empty folder. The tests run from a checkout, so what an installation would say of our entry points is
    put there.
    """
    information = aside / "hydra_pipeline_engine-0.dist-info"
    information.mkdir()
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n{name} = {value}\n" for group, named in entries.items() for name, value in named.items()]
    (information / "entry_points.txt").write_text("".join(lines))
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: hydra-pipeline-engine\nVersion: 0\n")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": f"{aside}{os.pathsep}{ROOT}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        [*command, "--reload_interval", "1", *arguments], env=environment, stderr=subprocess.PIPE, cwd=aside
    )
    try:
        yield _address(process)
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def _address(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    said, deadline = b"", time.monotonic() + LIMIT_S
    while not (found := re.search(rb"at (http://127\.0\.0\.1:\d+)/", said)):
        ready, _, _ = select.select([process.stderr], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(process.stderr.fileno(), 65536) if ready else b""
        assert data, f"TensorBoard did not start:\n{said.decode()}"
        said += data
    return found[1].decode()


def get(address: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and content; compression is not asked for."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=LIMIT_S) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def steps_of(address: str) -> dict[str, list[int]]:
    """Run -> the steps that the tab lists."""
    listed = json.loads(get(f"{address}/data/plugin/pipeline/runs")[2])["runs"]
    return {run["name"]: [step["step"] for step in run["steps"]] for run in listed}


def awaited(address: str, wanted: dict[str, list[int]]) -> dict[str, list[int]]:
    """The same once it is what is wanted, or after a while."""
    deadline = time.monotonic() + LIMIT_S / 2
    while (found := steps_of(address)) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


class Running:
    """A run that leaves traced steps in `folder` as it goes: its last stage takes twice as long, and times vary."""

    def __init__(self, folder: Path, of: recorded.Job) -> None:
        folder.mkdir(parents=True)
        self._record, _ = recorder(of, folder)
        self._of, self._at, self._random = of, 0, np.random.default_rng(0)
        self.steps = 0

    def step(self, count: int = 1) -> Running:
        for _ in range(count):
            durations = 50 * costs(self._of.compute)  # long enough for a document of every step
            durations[:, -1] *= 2
            varied = (durations * self._random.uniform(1, 1.25, durations.shape)).astype(np.int64)
            timeline = measured(self._of.compute, varied, self._of.replicas, 10 * MS, step=40 * MS, start=self._at)
            self._at = int(timeline.windows.max())
            for line in step_records(self._of, self.steps, timeline):
                self._record(line)
            self.steps += 1
        return self

    def flush(self) -> Running:
        """What a run does when it prints a step."""
        self._record._board.flush()
        return self

    def finish(self) -> dict[str, Any]:
        return self._record.finish("completed")


def event_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("events.out.tfevents*"))


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0})
    found.Reload()
    return found


def tags_of(folder: Path) -> set[str]:
    """Every tag in the event file of a run's folder."""
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag for kind in ("scalars", "histograms", "images", "tensors") for tag in found.Tags()[kind]}
