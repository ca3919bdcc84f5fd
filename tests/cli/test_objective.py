"""What a job returns to a sweeper, and how a sweep ends: `objective=`, `stop_sweep_on_failure=`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import command
import pytest
from command import Engine
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from engine.launch.failure_report import Outcome
from engine.objectives import OBJECTIVES, value
from engine.settings import KEYS, Settings

engine = command.engine  # a fixture
PLAN = ("mode=plan", "pipeline.ranks=4", "pipeline.microbatches=8")
SMALL = ("launch=threads", "model=mlp", "data=synthetic", "train.steps=2", "train.global_batch_size=8", "eval.every=0")
SMALL += ("model.features=16", "model.hidden=8", "data.shape=[16]", "data.samples=32")
SUMMARY = {
    "status": "completed", "loss": {"last": 2.0}, "evaluation": {"loss": 1.5, "accuracy": 0.75},
    "samples_per_second": 40, "step_time": {"median": 0.2}, "bubble": {"measured": 0.25},
}  # fmt: skip


class Hill(Sweeper):
    """Takes the schedule whose job returns least; a sweeper as others write them. Hydra finds it by its class."""

    returned: list[Any]

    def __init__(self, **_: Any) -> None:
        Hill.returned = []

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        for number, name in enumerate(("gpipe", "zb_h1", "naive")):
            (job,) = self.launcher.launch([[*arguments, f"schedule={name}"]], initial_job_idx=number)
            Hill.returned.append(job.return_value)


@pytest.fixture
def hill(monkeypatch: pytest.MonkeyPatch) -> str:
    """The override that chooses the sweeper above."""
    Plugins.instance().register(Hill)
    monkeypatch.setattr(Plugins, "is_in_toplevel_plugins_module", lambda self, name: True)
    return f"hydra.sweeper._target_={Hill.__module__}.Hill"


@pytest.mark.parametrize(("name", "expected"), [
    (None, 1.5), ("loss", 2.0), ("eval_loss", 1.5), ("accuracy", 0.75), ("samples_per_s", 40.0), ("step_time", 0.2),
    ("bubble", 0.25),
])  # fmt: skip
def test_each_objective_is_a_figure_of_the_summary(name: str | None, expected: float) -> None:
    assert value(name, SUMMARY) == expected
    assert set(KEYS["objective"].choices) == set(OBJECTIVES)


def test_a_job_that_failed_returns_the_worst_there_is() -> None:
    failed = SUMMARY | {"status": "failed"}
    assert [value(name, failed) for name in ("accuracy", "samples_per_s")] == [-math.inf] * 2
    assert [value(name, failed) for name in (None, "loss", "eval_loss", "step_time", "bubble")] == [math.inf] * 5
    assert value("loss", SUMMARY | {"loss": {"last": math.nan}}) == math.inf
    assert value(None, SUMMARY | {"evaluation": None}) == 2.0
    assert value("accuracy", SUMMARY | {"evaluation": {"loss": 1.5, "accuracy": None}}) == -math.inf


def test_a_sweeper_gets_the_bubbles_of_plans(engine: Engine, hill: str) -> None:
    said = engine("-m", *PLAN, hill)
    assert said.code == 0, said.err
    assert Hill.returned == pytest.approx([3 / 11, 1 / 9, 3 / 4])


def test_a_sweeper_gets_what_a_job_of_its_own_choice_costs(engine: Engine, hill: str) -> None:
    said = engine("-m", *PLAN, "objective=step_time", "plan.costs.forward=2", hill)
    assert said.code == 0, said.err
    plans = sorted(said.folder.glob("runs/**/plan.json"))
    assert Hill.returned == [json.loads(plan.read_text())["makespan"] for plan in plans]
    assert len(set(Hill.returned)) == 3


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["samples_per_s", "loss"])
def test_a_sweeper_gets_a_figure_of_a_training_job(engine: Engine, hill: str, name: str) -> None:
    said = engine("-m", *SMALL, f"objective={name}", hill)
    assert said.code == 0, said.err
    summaries = [json.loads(path.read_text()) for path in sorted(said.folder.glob("runs/**/summary.json"))]
    where = OBJECTIVES[name].trained.split(".")
    expected = [summary[where[0]] if len(where) == 1 else summary[where[0]][where[1]] for summary in summaries]
    assert Hill.returned == expected and all(isinstance(each, float) for each in expected)


@pytest.mark.filterwarnings("ignore")  # of the plugin's own libraries
def test_optuna_optimizes_it(engine: Engine) -> None:
    """With the real plugin, where it is installed: its best trial is the schedule with the least bubble."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper.optuna_sweeper", exc_type=ImportError)
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
    said = engine("-m", *PLAN, *optuna, "hydra/sweeper/sampler=grid", "schedule=choice(gpipe,zb_h1,naive)")
    assert said.code == 0, said.err
    (found,) = said.folder.glob("runs/**/optimization_results.yaml")
    assert "schedule: zb_h1" in found.read_text()


@pytest.mark.parametrize(("given", "words"), [
    (["objective=accurracy"], ["objective=accurracy", "did you mean accuracy"]),
    (["objective=accuracy", "mode=plan"], ["objective=accuracy", "mode=plan", "bubble", "step_time"]),
    (["objective=accuracy", "eval.every=0"], ["objective=accuracy", "eval.every"]),
    (["objective=bubble", "trace.every=0"], ["objective=bubble", "trace.every"]),
])  # fmt: skip
def test_a_figure_that_cannot_be_is_refused(engine: Engine, given: list[str], words: list[str]) -> None:
    said = engine("model=mlp", "data=synthetic", *given)
    assert said.code == 2 and all(word in said.err for word in words), said.err
    assert len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize(("stop", "ran"), [("true", ["1", "2"]), ("false", ["1", "2", "3", "4"])])
def test_a_sweep_stops_at_its_first_failure_on_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stop: str, ran: list[str]
) -> None:
    jobs: list[str] = []

    def train(settings: Settings, start_dir: str, run_dir: str) -> Outcome:
        jobs.append(str(settings.pipeline.microbatches))
        return Outcome("failed", "no luck", 1) if jobs[-1] == "2" else Outcome("completed")

    monkeypatch.setattr(command.run, "train", train)
    said = engine("-m", f"stop_sweep_on_failure={stop}", "pipeline.microbatches=1,2,3,4", *SMALL)
    assert said.code == 1 and jobs == ran
    last = said.err.strip().splitlines()[-1]
    assert ("job 1 failed" in last and "stop_sweep_on_failure=true" in last) == (stop == "true"), last
    (table,) = Path(said.folder).glob("runs/**/comparison.json")
    assert len(json.loads(table.read_text())) >= 1
