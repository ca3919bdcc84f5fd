"""Sweeps: one folder per job, no job hides or stops another, a table at the end."""

from __future__ import annotations

import json
import signal
import warnings
from pathlib import Path

import command
import pytest
from command import Engine
from omegaconf import OmegaConf

from engine.cli import main as cli
from engine.cli import run
from engine.cli.attempts import CONFIG_NAME
from engine.launch.failure_report import Outcome
from engine.settings import Settings

engine = command.engine  # a fixture
SMALL = ["launch=threads", "model=mlp", "data=synthetic", "train.steps=2", "train.global_batch_size=8", "eval.every=0"]
SMALL += ["model.features=16", "model.hidden=8", "data.shape=[16]", "data.samples=32"]


def sweep_folder(folder: Path) -> Path:
    (found,) = folder.glob("runs/*/*-sweep")
    return found


@pytest.mark.slow
def test_one_folder_per_job_and_a_table(engine: Engine) -> None:
    said = engine("-m", *SMALL, "schedule=naive,gpipe,1f1b", "pipeline.microbatches=1,4")
    assert said.code == 0, said.err
    folder = sweep_folder(said.folder)
    jobs = [json.loads((folder / str(job) / "summary.json").read_text()) for job in range(6)]
    assert [(job["schedule"], job["microbatches"]) for job in jobs] == [
        (schedule, m) for schedule in ("naive", "gpipe", "1f1b") for m in (1, 4)
    ]
    assert all(len(list((folder / str(job)).glob("events*"))) == 1 for job in range(6))
    table = (folder / "comparison.txt").read_text()
    assert said.out.rstrip().endswith(f"{table.rstrip()}\n\n{folder / 'comparison.html'}")
    assert "micro-batches" in (folder / "comparison.html").read_text()
    assert len(json.loads((folder / "comparison.json").read_text())) == 6


@pytest.mark.slow
def test_a_failed_job_neither_stops_nor_hides_the_others(engine: Engine) -> None:
    said = engine("-m", *SMALL, "pipeline.microbatches=1,100,2")
    assert said.code == 1
    assert "pipeline.microbatches=100" in said.err
    rows = json.loads((sweep_folder(said.folder) / "comparison.json").read_text())
    assert [row["status"] for row in rows] == ["completed", "failed", "completed"]
    assert said.out.splitlines()[-1] == str(sweep_folder(said.folder) / "comparison.html")
    assert "\njob 1: pipeline.microbatches=100" in said.out.rpartition("overrides")[2]
    assert "pipeline.microbatches=100" in (sweep_folder(said.folder) / "comparison.html").read_text()


CODES = {  # micro-batches of the jobs, of which 0 is refused and 3 fails -> the exit code
    "1,2": 0,
    "1,0": 1,
    "0,1": 1,
    "0,3": 1,
    "1,3": 1,
    "0,-1": run.REFUSED,
}


@pytest.mark.parametrize("jobs", CODES)
@pytest.mark.slow(keep=1)
def test_the_exit_code_says_whether_anything_was_started(
    jobs: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(settings: Settings, start_dir: str, run_dir: str) -> Outcome:
        folder, failed = Path(run_dir), settings.pipeline.microbatches == 3
        (folder / CONFIG_NAME).write_text("{}")
        return run.finish(folder, Outcome("failed", "it broke", 1) if failed else Outcome("completed"), settings)

    monkeypatch.setattr(run, "train", train)
    said = engine("-m", f"pipeline.microbatches={jobs}")
    assert said.code == CODES[jobs], said.err
    cli._outcomes.clear()  # as if a launcher had run the jobs in other processes
    cli.SweepTable().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep_folder(said.folder))}}}))
    assert cli._exit_code() == CODES[jobs]


@pytest.mark.slow
def test_a_sweep_whose_folder_is_taken_starts_nothing(engine: Engine) -> None:
    given = ["-m", "mode=plan", "hydra.sweep.dir=here"]
    (engine(*given, "pipeline.microbatches=1").folder / "here" / "0" / CONFIG_NAME).write_text("{}")
    assert engine(*given, "pipeline.microbatches=1").code == run.REFUSED
    assert engine(*given, "pipeline.microbatches=1,2").code == 1


@pytest.mark.slow
def test_an_interruption_ends_the_sweep(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def train(settings: Settings, start_dir: str, run_dir: str) -> Outcome:
        started.append(settings.pipeline.microbatches)
        return Outcome("interrupted", "interrupted by SIGTERM", 128 + signal.SIGTERM)

    monkeypatch.setattr(run, "train", train)
    said = engine("-m", "pipeline.microbatches=1,2")
    assert said.code == 143
    assert started == [1]
    assert "-  unfinished" in (sweep_folder(said.folder) / "comparison.txt").read_text()


@pytest.mark.slow
def test_a_comparison_that_cannot_be_written_is_shown_and_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(settings: Settings, start_dir: str, run_dir: str) -> Outcome:
        (Path(run_dir).parent / "comparison.json").mkdir(exist_ok=True)
        return run.finish(Path(run_dir), Outcome("completed"), settings)

    monkeypatch.setattr(run, "train", train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Hydra makes one of what a callback raises
        said = engine("-m", "pipeline.microbatches=1,2")
    assert said.code == 1
    assert "pipeline.microbatches=2" in said.out.rpartition("overrides")[2]
    assert said.err.splitlines()[-1].startswith(
        "error: the sweep's comparison is lost: comparison.json cannot be written"
    )


@pytest.mark.slow
def test_an_experiment_that_sweeps_by_itself(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def train(settings: Settings, start_dir: str, run_dir: str) -> Outcome:
        seen.append((settings.schedule["name"], settings.pipeline.microbatches, settings.model["_target_"]))
        return run.finish(Path(run_dir), Outcome("completed"), settings)

    monkeypatch.setattr(run, "train", train)
    assert engine("experiment=schedules").code == 0
    expected = [(s, m, "models.sleep.sleep") for s in ("naive", "gpipe", "1f1b") for m in (2, 4, 8)]
    assert seen == expected


@pytest.mark.slow
def test_a_sweep_of_the_ways_to_train_ends_with_their_table(engine: Engine) -> None:
    """The experiment itself, on a smaller model."""
    small = ["model=sleep", "model.forward_ms=0", "model.input_backward_ms=0", "model.weight_backward_ms=0"]
    data = ["data=synthetic", "data.samples=32", "train.global_batch_size=8", "train.steps=2", "model.stages=2"]
    said = engine("experiment=parallel", "launch=threads", "pipeline.microbatches=2", *small, *data)
    assert said.code == 0, said.err
    lines = said.out[said.out.index("Plain, data-parallel, model-parallel.") :].splitlines()
    ways = [line.split()[:4] for line in lines[3:7]]
    assert ways == [["plain", "0", "1", "8"], ["data-parallel", "1", "2", "4"],
                    ["model-parallel", "2", "2", "8"], ["both", "3", "4", "4"]]  # fmt: skip
    page = (sweep_folder(said.folder) / "comparison.html").read_text()
    assert "Amdahl&#x27;s law" in page and "model-parallel" in page
    rows = json.loads((sweep_folder(said.folder) / "comparison.json").read_text())
    plain, pipeline = rows[0], rows[2]
    assert plain["bytes_sent_per_device"] == [0] and min(pipeline["bytes_sent_per_device"]) > 0
    assert sum(pipeline["memory"]["parameters"]) == plain["memory"]["parameters"][0]
