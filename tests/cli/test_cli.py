"""The command line: what it accepts, what it refuses and how, where files go, what torchrun sees."""

from __future__ import annotations

import json
import time
from pathlib import Path

import command
import pytest
from command import LIMIT_S, Engine, engine_process

from engine.cli import run
from engine.settings import Settings

engine, trained = command.engine, command.trained  # fixtures

# ---- plan ----------------------------------------------------------------------------------------------------------


def test_plan_prints_and_writes_the_published_figures(engine: Engine) -> None:
    said = engine("mode=plan", "schedule=1f1b", "pipeline.ranks=4", "pipeline.microbatches=8")
    assert said.code == 0 and said.err == ""
    (folder,) = said.runs
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["makespan"] == 33 and plan["bubble_fraction"] == pytest.approx(3 / 11)
    assert [rank["peak_in_flight"] for rank in plan["per_rank"]] == [4, 3, 2, 1]
    assert (folder / "program.csv").read_text().splitlines()[3].startswith("3F0,3B0,3F1,3B1")
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    assert "0.2727" in said.out
    assert not list(folder.glob("events*"))


@pytest.mark.slow
def test_plan_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv[0] = 'engine'; from engine.cli.main import main; main(); sys.exit('torch' in sys.modules)"
    )
    process = engine_process(["mode=plan", "pipeline.ranks=64", "pipeline.microbatches=512"], tmp_path, "-c", code)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err


@pytest.mark.parametrize("cost", ["1e308", "1e400", "nan", "-1"])
@pytest.mark.slow(keep=2)
def test_plan_refuses_costs_that_cannot_be_added(cost: str, engine: Engine) -> None:
    said = engine("mode=plan", f"plan.costs.forward={cost}")
    assert said.code == run.REFUSED and "plan.costs.forward" in said.err and said.err.count("\n") == 1, said.err


def test_plan_draws_costs_however_far_apart(engine: Engine) -> None:
    assert engine("mode=plan", "plan.costs.forward=[1e-320,1e15]").code == 0


def test_plan_takes_costs(engine: Engine) -> None:
    said = engine(
        "mode=plan", "plan.costs.forward=[1,3]", "plan.costs.input_backward=0", "plan.costs.weight_backward=0"
    )
    assert said.code == 0
    assert json.loads((said.runs[0] / "plan.json").read_text())["makespan"] == 1 + 4 * 3
    said = engine("mode=plan", "plan.costs.forward=[1,3,5]")
    assert said.code == run.REFUSED and "plan.costs.forward" in said.err


# ---- refusals ------------------------------------------------------------------------------------------------------

WRONG = {
    "schedule=gpip": ["schedule=gpip", "gpipe", "1f1b", "naive"],
    "model=resnet51": ["model=resnet51", "resnet50"],
    "pipeline.rank=4": ["pipeline.rank", "pipeline.ranks"],
    "+pipeline.rank=4": ["pipeline.rank", "pipeline.ranks"],
    "+pipelin=4": ["pipelin", "pipeline"],
    "pipelin=4": ["pipelin", "pipeline"],
    "pipeline.ranks=0": ["pipeline.ranks=0", "at least 1"],
    "pipeline.ranks=-2": ["pipeline.ranks=-2", "at least 1"],
    "pipeline.ranks=two": ["pipeline.ranks=two", "whole number"],
    "pipeline.ranks=2.5": ["pipeline.ranks=2.5", "whole number"],
    "pipeline.microbatches=0": ["pipeline.microbatches=0", "at least 1"],
    "pipeline.microbatches=65": ["pipeline.microbatches=65", "64"],
    "data_parallel.replicas=64": ["64 replica", "at least 256"],
    "train.steps=0": ["train.steps=0", "at least 1"],
    "timeout_s=0": ["timeout_s=0", "above 0"],
    "timeout_s=1e400": ["timeout_s=inf", "finite"],
    "pipeline.ranks=-0": ["pipeline.ranks=0", "at least 1"],
    "pipeline.ranks=1e9": ["pipeline.ranks=1000000000.0", "whole number"],
    "pipeline.microbatches=1000000000": ["pipeline.microbatches=1000000000", "at most 16,777,216"],
    "+schedule.chunks=1000000000": ["schedule.chunks=1000000000", "at most 16,777,216"],
    "+schedule.waves=1000000000": ["schedule.waves=1000000000", "at most 16,777,216"],
    "data.workers=100000": ["data.workers=100000", "at most 256"],
    "train.stop_on_nan=perhaps": ["train.stop_on_nan=perhaps", "true or false"],
    "device=gpu": ["device=gpu", "cuda"],
    "recompute=full": ["recompute=full", "not part of the engine yet"],
    "precision=fp16": ["precision=fp16", "not part of the engine yet", "bf16"],
    "partition=time": ["partition=time", "not part of the engine yet", "uniform"],
    "model=null": ["model=null", "resnet50", "mlp"],
    "optimizer=3": ["optimizer=3", "sgd"],
    "=3": ["=3", "key=value"],
    "pipeline=null": ["pipeline=null", "ranks, microbatches"],
    "timeout_s=1e300": ["timeout_s=1e+300", "at most 2000000"],
    "lr_scheduler._target_=null": ["lr_scheduler._target_=null"],
    "model.split=layer3": ["model.split=layer3", "[layer2,layer3]"],
    "partition.split=[layer2]": ["partition.split", "partition=manual would take it"],
    "model.depth=3": ["model.depth: no such key", "model=mlp would take it"],
    "+partition.split=5": ["partition.split=5", "[layer2,layer3]"],
    "+partition.split=[5]": ["partition.split=[5]", "[layer2,layer3]"],
    "data.workers=-1": ["data.workers=-1", "at least 0"],
    "data.workers=two": ["data.workers=two", "whole number"],
    "data.shuffle=perhaps": ["data.shuffle=perhaps", "true or false"],
    "data.pin_memory=7": ["data.pin_memory=7", "auto, true, false"],
    "data.evaluation=3": ["data.evaluation=3", "{split: test}"],
    "hydra.run.dir=taken/inside": ["taken", "hydra.run.dir=FOLDER"],
    "schedule=naive,gpipe": ["schedule=naive,gpipe is several values", "add -m\n"],
    "pipeline.ranks=1,2": ["pipeline.ranks=1,2 is several values", "add -m", "'pipeline.ranks=[1,2]'"],
    "schedule=[1f2b]": ["schedule=1f2b: no such choice; did you mean 1f1b?", "gpipe"],
    "model=[nothing]": ["model=nothing: no such choice", "mlp", "resnet50"],
    "experiment=[parallel,schedule]": ["experiment=schedule: no such choice; did you mean schedules?"],
    "schedule=[1f1b,gpipe]": [
        "schedule=[1f1b,gpipe]: schedule is chosen by the name",
        "naive",
        "-m schedule=1f1b,gpipe\n",
    ],
    "data=['digits',text]": ["data=['digits',text]", "synthetic", "-m data=digits,text\n"],
    "data=[]": ["data=[]: data is chosen by the name", "synthetic"],
    "schedule=[1]": ["schedule=[1]: schedule is chosen by the name", "naive"],
    "+schedule=[[gpipe]]": ["+schedule=[[gpipe]]: schedule is chosen by the name", "naive"],
    "+schedule=1f1b": ["+schedule=1f1b: schedule is chosen already", "to change that: schedule=1f1b\n"],
    "++schedule=1f1b": ["to change that: schedule=1f1b\n"],
    "+experiment=schedules": ["to change that: experiment=schedules\n"],
    "experiment=[1]": ["experiment=[1]: experiment is chosen by the name", "parallel, schedules"],
    "partition.split=[layer2": ["partition.split=[layer2", "'partition.split=[layer2,layer3]'"],
}


@pytest.mark.parametrize("override", WRONG)
@pytest.mark.slow(keep=16)
def test_wrong_input_is_refused_by_name(override: str, engine: Engine, trained: list[object], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    said = engine(override)
    assert said.code == run.REFUSED
    assert not trained
    assert said.err.startswith("error: ") and "Traceback" not in said.err
    for part in WRONG[override]:
        assert part in said.err, said.err
    assert not list(said.folder.glob("**/events*"))


@pytest.mark.parametrize("wrong", ["schedule=3", "optimizer=null", "partition=true"])
def test_of_several_groups_the_one_without_a_name_is_blamed(wrong: str, engine: Engine) -> None:
    said = engine("model=mlp", "data=synthetic", wrong, "allreduce=[ring]")
    group = wrong.partition("=")[0]
    assert said.code == run.REFUSED and said.err.startswith(f"error: {wrong}: {group} is chosen by the name of a file")


@pytest.mark.parametrize("jobs", ["[gpipe,1f1b],naive", "naive,[3]", "naive,[1f2b]"])
def test_a_sweep_with_a_list_for_a_group_starts_no_job(jobs: str, engine: Engine, trained: list[object]) -> None:
    said = engine("-m", f"schedule={jobs}")
    assert said.code == run.REFUSED and not trained
    assert said.err.startswith("error: schedule=") and said.err.count("\n") == 1 and "gpipe" in said.err, said.err


@pytest.mark.parametrize("chosen", ["schedule=[1f1b]", "schedule='1f1b'", "schedule={name: 1f1b}"])
@pytest.mark.slow(keep=2)
def test_a_group_may_be_chosen_in_hydras_other_ways(
    chosen: str, engine: Engine, trained: list[tuple[Settings, str, str]]
) -> None:
    assert engine(chosen).code == 0
    assert trained[0][0].schedule["name"] == "1f1b"


def test_experiments_are_laid_over_each_other(engine: Engine, trained: list[tuple[Settings, str, str]]) -> None:
    assert engine("experiment=[parallel,schedules]", "hydra.mode=RUN").code == 0
    assert (trained[0][0].train.steps, trained[0][0].optimizer["_target_"]) == (6, "torch.optim.Adam")


def test_refusal_is_left_in_the_run_folder(engine: Engine) -> None:
    said = engine("pipeline.ranks=0")
    (folder,) = said.runs
    assert (folder / "error.txt").read_text() == "pipeline.ranks=0 must be at least 1\n"
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


# ---- what users write ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["[layer2,layer3]", "[layer2, layer3]", "['layer2','layer3']"])
@pytest.mark.slow(keep=2)
def test_forms_of_a_list(form: str, engine: Engine, trained: list[tuple[Settings, str, str]]) -> None:
    assert engine("partition=manual", f"partition.split={form}", "pipeline.ranks=3").code == 0
    assert trained[0][0].partition["split"] == ["layer2", "layer3"]


def test_a_path_with_a_comma(engine: Engine, trained: list[tuple[Settings, str, str]]) -> None:
    assert engine("+data.root='a, b'").code == 0
    assert trained[0][0].data["root"] == "a, b"


@pytest.mark.slow
def test_a_sweep_over_lists(engine: Engine, trained: list[tuple[Settings, str, str]]) -> None:
    engine("-m", "partition=manual", "partition.split=[layer2],[layer3]")
    assert [settings.partition["split"] for settings, _, _ in trained] == [["layer2"], ["layer3"]]


def test_interpolations_reach_the_workers_as_plain_values(
    engine: Engine, trained: list[tuple[Settings, str, str]]
) -> None:
    said = engine("+data.when=${now:%Y}", "+data.out=${hydra:runtime.output_dir}/x", "+data.batch=${pipeline.ranks}")
    data = trained[0][0].data
    assert data["when"] == time.strftime("%Y")
    assert (data["out"], data["batch"]) == (f"{said.runs[0]}/x", 2)


@pytest.mark.parametrize("chdir", ["false", "true"])
def test_paths_are_relative_to_the_start_folder(
    chdir: str, engine: Engine, trained: list[tuple[Settings, str, str]]
) -> None:
    said = engine(f"hydra.job.chdir={chdir}")
    _, start_dir, run_dir = trained[0]
    assert Path(start_dir) == said.folder
    assert Path(run_dir) == said.runs[0] and Path(run_dir).is_absolute()


@pytest.mark.slow
def test_null_seed_differs_between_the_jobs_of_a_sweep(
    engine: Engine, trained: list[tuple[Settings, str, str]]
) -> None:
    engine("-m", "seed=null", "pipeline.microbatches=1,2")
    seeds = [settings.seed for settings, _, _ in trained]
    assert len(set(seeds)) == 2


def test_a_folder_called_conf_does_not_shadow_ours(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("mode: shadowed\n")
    assert engine("mode=plan").code == 0


def test_own_configuration_folder(engine: Engine, tmp_path: Path, trained: list[tuple[Settings, str, str]]) -> None:
    mine = tmp_path / "mine" / "model"
    mine.mkdir(parents=True)
    (mine / "own.yaml").write_text("_target_: my.model\nloss: {_target_: torch.nn.MSELoss}\n")
    assert engine("--config-dir", "mine", "model=own").code == 0
    assert trained[0][0].model["_target_"] == "my.model"


@pytest.mark.slow
def test_five_runs_started_together_have_five_folders(tmp_path: Path) -> None:
    processes = [engine_process(["mode=plan", f"pipeline.microbatches={m}"], tmp_path) for m in range(1, 6)]
    for process in processes:
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
    plans = [json.loads(path.read_text())["microbatches"] for path in tmp_path.glob("runs/*/*/plan.json")]
    assert sorted(plans) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_model_named_on_the_command_line_takes_no_split_of_anothers(
    engine: Engine, trained: list[tuple[Settings, str, str]]
) -> None:
    assert engine("model._target_=models.mlp.mlp").code == 0
    assert trained[0][0].model["split"] is None
    assert engine("model._target_=models.mlp.mlp", "model.split=[layer2]").code == 0
    assert trained[1][0].model["split"] == ["layer2"]
    assert engine("model.classes=7").code == 0
    assert trained[2][0].model["split"] == ["layer4"]
