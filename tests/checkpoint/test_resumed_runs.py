"""`resume` on the command line: one folder, one summary, one curve, whatever number of attempts there was."""

from __future__ import annotations

import json
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from command import LIMIT_S, Engine, engine, engine_process  # noqa: F401
from harness import equal, run_threads
from safetensors.torch import load_file
from test_resume import at, wanted

from engine.checkpoint import store
from engine.checkpoint.keeper import Keeper
from engine.checkpoint.names import FOLDER
from engine.job import Job
from engine.launch.ending import Ending
from engine.launch.launch import in_threads
from engine.prepare.prepare import prepare
from engine.settings import CheckpointSettings, Eval
from engine.telemetry.records import Record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of tensorboard's own imports
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TINY = [
    "model=mlp", "model.features=768", "model.hidden=8", "data.size=16", "launch=threads", "optimizer=adam",
    "pipeline.microbatches=2", "train.global_batch_size=8", "checkpoint.every_steps=2",
]  # fmt: skip


def curve(folder: Path, tag: str) -> dict[int, float]:
    """Step -> value; a step that is there twice fails."""
    (file,) = folder.rglob("events.out.tfevents*")  # exactly one, also among what attempts have left
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    points = events.Scalars(tag)
    assert [point.step for point in points] == sorted({point.step for point in points})
    return {point.step: point.value for point in points}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_attempts_are_one_run(engine: Engine, tmp_path: Path) -> None:  # noqa: F811
    assert engine(*TINY, "train.steps=6", "hydra.run.dir=whole").code == 0
    assert engine(*TINY, "train.steps=4", "hydra.run.dir=cut").code == 0
    again = engine("resume=cut", "train.steps=6", "pipeline.ranks=4")
    assert again.code == 0, again.err
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for name in ("train/loss", "train/lr"):
        assert curve(cut, name) == pytest.approx(curve(whole, name), rel=1e-4)  # in single precision, another cut
        assert list(curve(cut, name)) == list(range(6))
    assert list(curve(cut, "eval/loss")) == [4, 6]
    one, two = (json.loads((folder / "summary.json").read_text()) for folder in (whole, cut))
    assert (two["status"], two["steps"], two["samples"]) == ("completed", one["steps"], one["samples"])
    assert two["loss"]["first"] == one["loss"]["first"] and two["checkpoint"]["resumed_from"] == 4
    assert sorted(path.name for path in (cut / "checkpoints").iterdir()) == ["step-000000004", "step-000000006"]
    log = (cut / "engine.log").read_text()
    assert "not as before: pipeline.ranks: 2 -> 4" in log and "not as before: train.steps: 4 -> 6" in log
    kept = cut / "attempts" / "000"
    assert json.loads((kept / "config.json").read_text())["train"]["steps"] == 4
    assert "train.steps=4" in (kept / ".hydra" / "overrides.yaml").read_text()
    assert json.loads((kept / "summary.json").read_text())["steps"] == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_auto_begins_and_goes_on_in_its_folder(engine: Engine, tmp_path: Path) -> None:  # noqa: F811
    auto = [*TINY, "resume=auto", "hydra.run.dir=run"]
    assert engine(*TINY, "train.steps=6", "hydra.run.dir=whole").code == 0
    for number, steps in enumerate((2, 4, 6)):
        said = engine(*auto, f"train.steps={steps}")
        assert said.code == 0, said.err
        assert len(list((tmp_path / "run" / "attempts").glob("*"))) == number
    assert equal(load_file("run/model.safetensors"), load_file("whole/model.safetensors"))
    assert curve(tmp_path / "run", "train/loss") == curve(tmp_path / "whole", "train/loss")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resume=nowhere"], "is not the folder of a run that was started"),
        (["resume=auto", "mode=plan"], "resume=auto goes on training"),
        (["resume=auto", "init.weights=x"], "resume takes its weights from the checkpoint"),
        (["data_parallel.replicas=2", "data_parallel.mode=async", "allreduce=parameter_server"],
         "checkpoints of data_parallel.mode=async are not possible"),
        (["schedule=pipedream", "checkpoint.every_minutes=5"], "drains for a checkpoint, at steps that must be known"),
        (["checkpoint.best=true", "eval.every=0"], "checkpoint.best=true needs evaluations"),
        (["checkpoint.every_steps=0"], "checkpoint.every_steps=0 must be at least 1"),
    ],
)  # fmt: skip
def test_refusals(engine: Engine, arguments: list[str], said: str) -> None:  # noqa: F811
    told = engine(*TINY, *arguments)
    assert told.code == 2 and said in told.err and told.err.count("\n") == 1, told.err
    assert not list(Path().rglob("checkpoints"))


def test_a_run_without_a_whole_checkpoint_is_refused(engine: Engine, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert "it has no checkpoints" in engine(*TINY, "resume=run").err
    (folder / "checkpoints" / "step-000000002").mkdir(parents=True)
    assert "none of its checkpoints is whole" in engine(*TINY, "resume=run").err
    assert "holds a run already" in engine(*TINY, "hydra.run.dir=run").err
    assert (folder / "config.json").read_text() == "{}"


class Asking:
    """A record listener that asks the run to end when it hears of a step."""

    def __init__(self, job: Job, step: int, keeper: Keeper) -> None:
        self.ending, self.step, self.keeper = Ending(job, lambda record: None), step, keeper
        self.steps: set[int] = set()
        self.asked = False

    def __call__(self, record: Record) -> None:
        if record.kind == "step":
            self.steps.add(record.meta["step"])
            if record.meta["step"] == self.step and not self.asked:
                self.asked = self.ending.ask(signal.SIGTERM)
        self.keeper(record)


@pytest.mark.parametrize(("schedule", "replicas"), [("1f1b", 1), ("gpipe", 2), ("pipedream_2bw", 1)])
def test_a_run_that_is_asked_to_end_saves_and_ends_on_all_ranks(
    schedule: str, replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    every = CheckpointSettings(every_steps=3 if schedule == "pipedream_2bw" else 10**6)
    asked = wanted(schedule, 2, 2, replicas, steps=60, lr_scheduler=None, checkpoint=every, eval=Eval(every=0))
    asked = replace(asked, data={"_target_": "toys.Tokens"})
    job = prepare(asked, ".", ".")
    keeper = Keeper(job, Path(), {}, dict, lambda level, text: None)
    keeper.begin()
    heard = Asking(job, 4, keeper)
    outcome = in_threads(job, heard)
    keeper.close()
    assert (outcome.status, outcome.exit_code) == ("interrupted", 75), outcome
    (last, *_) = store.steps_of(Path(FOLDER))
    assert f"ended after {last} steps" in str(outcome.error) and heard.steps == set(range(last))
    assert 5 <= last < 60
    assert not [path.name for path in Path(FOLDER).iterdir() if path.name.startswith(".")]
    assert not heard.ending.ask(signal.SIGTERM)  # the second ends it now
    found = run_threads(asked, resumed=at(last))
    assert equal(found.state(), run_threads(asked).state())


@pytest.mark.slow
@pytest.mark.process
def test_sigterm_saves_and_the_next_job_goes_on(engine: Engine, tmp_path: Path) -> None:  # noqa: F811
    arguments = [word for word in TINY if not word.startswith(("launch", "checkpoint"))]
    arguments += ["checkpoint.every_steps=1000000", "hydra.run.dir=run", "resume=auto", "eval.every=0"]
    process = engine_process([*arguments, "train.steps=1000000"], tmp_path)
    log = tmp_path / "run" / "engine.log"
    deadline = time.monotonic() + LIMIT_S
    while not (log.exists() and "ready" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75 and "as it was asked to; resume=FOLDER goes on" in err, err
    (step,) = store.steps_of(tmp_path / "run" / FOLDER)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    said = engine(*arguments, "launch=threads", f"train.steps={step + 2}")
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == step + 2
