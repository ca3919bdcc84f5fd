"""What other programs rely on is still there: commands, keys, tags, files and imports, in a venv with the wheel alone.

The names here are written out on purpose: a rename of the code does not rename them, it fails.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest
from tensorboards import tags_of
from test_packaging import wheel  # noqa: F401

import engine
from engine.cli.help import default
from engine.folder.rows import read_rows

ROOT = Path(__file__).parents[1]
OLD_RUN = ROOT / "tests" / "data" / "run-0.1.0"
KEYS = {
    "mode": "train", "schedule": "gpipe", "model": "resnet50", "partition": "model", "data": "digits",
    "optimizer": "adam", "lr_scheduler": "cosine", "allreduce": "ring", "pipeline.ranks": "2",
    "pipeline.microbatches": "4", "launch": "processes", "data_parallel.replicas": "1", "train.steps": "null",
    "train.epochs": "null", "train.global_batch_size": "64", "train.clip_norm": "null", "train.accumulate": "1",
    "eval.every": "null", "eval.batch_size": "null", "recompute": "none", "trace.every": "1", "timeout_s": "600",
    "allreduce.bucket_bytes": str(25 * 2**20), "seed": "0", "device": "auto", "precision": "fp32",
    "threads_per_worker": "null", "plan.costs.forward": "1", "plan.costs.input_backward": "1",
    "plan.costs.weight_backward": "1", "plan.costs.transfer": "0",
}  # fmt: skip
NAMES = {
    "Compression", "DistributedOptimizer", "broadcast_optimizer_state", "broadcast_parameters", "init", "rank",
    "shutdown", "size",
}  # fmt: skip
FILES = {"summary.json", "plan.json", "program.csv", "trace.json", "engine.log", "config.json", "costs.json"}
SUMMARY = {
    "status", "schedule", "ranks", "stages", "microbatches", "replicas", "steps", "samples", "loss", "step_time",
    "samples_per_second", "bubble", "peak_in_flight", "peak_activation_bytes", "evaluation", "allreduce",
    "bytes_sent_between_stages",
}  # fmt: skip
PLAN = {
    "schedule", "ranks", "stages", "microbatches", "placement", "program", "lowered", "bubble_fraction", "bubble_rate",
    "makespan", "per_rank",
}  # fmt: skip
WAITS = ("fill", "stall", "transfer", "reduce", "optimizer", "data", "drain", "other")
TAGS = {
    "train/loss", "train/lr", "throughput/samples_per_second", "bubble/ideal", "bubble/predicted", "bubble/measured",
    "memory/rank0/peak_in_flight", "memory/rank0/peak_activation_bytes", "timeline/predicted", "timeline/measured",
    "report/text_summary", *(f"bubble/rank1/{name}" for name in WAITS),
}  # fmt: skip
IMPORTS = f"""
import importlib.metadata, engine, models, warnings
warnings.simplefilter("ignore")
assert set(engine.__all__) >= {NAMES!r}
assert all(getattr(engine, name) for name in engine.__all__)
(entry,) = [e for e in importlib.metadata.entry_points(group="tensorboard_plugins") if e.value.startswith("engine.")]
assert (entry.name, entry.load().plugin_name) == ("pipeline", "pipeline")
print(engine.__file__, engine.__version__, importlib.metadata.version("hydra-pipeline-engine"))
"""


def test_keys_and_their_defaults() -> None:
    assert {path: default(path) for path in KEYS} == KEYS


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "engine/__init__.py"
    assert f"\n## {engine.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_a_folder_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "sweep" / "0"
    shutil.copytree(OLD_RUN, folder)
    (row,) = read_rows(folder.parent)
    assert (row["status"], row["ranks"], row["steps"]) == ("completed", 2, 3)
    assert json.loads((folder / "summary.json").read_text()).keys() >= SUMMARY


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The interpreter of a new venv that has the wheel, and what it depends on from here, but not the checkout."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    # A path file names a folder without reading the path files in it, that of the editable checkout among them.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    return python


def call(python: Path, folder: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_commands_imports_files_and_tags_from_the_wheel(python: Path, tmp_path: Path) -> None:
    file, version, installed = call(python, tmp_path, "-c", IMPORTS).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert version == installed == engine.__version__
    assert "pipeline.microbatches=4" in call(python, tmp_path, "-m", "engine", "--help")
    tiny = ["model=mlp", "model.features=192", "model.hidden=16", "data.size=8", "train.steps=2", "hydra.run.dir=run"]
    assert "completed: gpipe" in call(python, tmp_path, "-m", "engine", *tiny)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left >= FILES and len([name for name in left if name.startswith("events.out.tfevents.")]) == 1
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.keys() >= SUMMARY and summary["bubble"].keys() >= {"ideal", "predicted", "measured", "per_rank"}
    assert summary["bubble"]["per_rank"][0].keys() >= {"rank", "replica", "compute", "bubble", *WAITS}
    assert json.loads((tmp_path / "run" / "plan.json").read_text()).keys() >= PLAN
    assert tags_of(tmp_path / "run") >= TAGS
    for run in (tmp_path / "run", OLD_RUN):
        assert "this run" in call(python, tmp_path, "-m", "engine.report", str(run))
    assert tags_of(OLD_RUN) >= TAGS
