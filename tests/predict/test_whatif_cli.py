"""`python -m engine.report`: the table, the file, and one clear line for every folder that has no answer."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import command
import pytest
import recorded
from command import Engine
from finished import MS, finished, job_of

from engine.plan.views.text import to_csv
from engine.report.__main__ import main

ROOT = Path(__file__).parents[2]

engine = command.engine  # a fixture


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of arguments that are refused: one line."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    return said.err


def test_the_table_has_the_run_among_its_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(tmp_path / "run", job_of("gpipe", 3, 6, layers=2), transfer=MS // 5)
    assert main([str(folder), "--json", str(tmp_path / "answer.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder}: gpipe, 3 ranks, 6 micro-batches; ")
    own = [line for line in lines if line.startswith(">")]
    assert len(own) == 1 and "this run" in own[0]
    table = [line for line in lines if " %" in line and "schedule=" in line]
    assert {"schedule=1f1b", "schedule=zb_h1"} <= {word for line in table for word in line.split()}
    found = json.loads((tmp_path / "answer.json").read_text())
    assert found["baseline"]["step"] == pytest.approx(found["measured"]["step"], rel=0.01)
    steps = [each["step"] for each in found["predictions"]]
    assert steps == sorted(steps)
    assert {"words": "12 micro-batches"}.items() <= {
        key: value for left in found["left_out"] if left["words"] == "12 micro-batches" for key, value in left.items()
    }.items()
    assert all(len(each["memory"]) == 3 for each in found["predictions"])


def test_one_thing_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(tmp_path / "run", job_of("gpipe", 2, 4, layers=2))
    assert main([str(folder), "--schedule", "1f1b", "--split", "block1"]) == 0
    said = capsys.readouterr().out
    assert "1f1b, split block1" in said
    assert "schedule=1f1b partition=manual partition.split=[block1]" in said
    assert "zb_h1" not in said


def test_a_run_that_is_not_met_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(tmp_path / "run")
    measured = json.loads((folder / "summary.json").read_text())
    for times, said in ((1.1, False), (1.3, True), (0.8, True)):
        seconds = measured["step_time"]["median"] * times
        (folder / "summary.json").write_text(json.dumps(measured | {"step_time": {"median": seconds}}))
        assert main([str(folder)]) == 0
        assert ("This run itself is not met" in capsys.readouterr().out) is said


def test_a_run_given_twice_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (finished(tmp_path / str(m), job_of("gpipe", 2, m)) for m in (4, 8))
    assert main([str(one), str(two), str(one), str(two)]) == 0
    assert f"With the costs of {two}. " in capsys.readouterr().out
    assert main([str(one), str(one), "--split", " block1 "]) == 0
    assert "With the costs of" not in capsys.readouterr().out


def test_another_run_tells_the_size_of_micro_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (finished(tmp_path / str(m), job_of("gpipe", 2, m)) for m in (4, 8))
    assert main([str(one)]) == 0
    assert "8 micro-batches: between" in capsys.readouterr().out
    assert main([str(one), str(two)]) == 0
    said = capsys.readouterr().out
    assert "pipeline.microbatches=8" in said and f"With the costs of {two}" in said


@pytest.mark.slow
def test_jobs_of_a_sweep_are_found_by_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job, microbatches in enumerate((4, 8)):
        finished(tmp_path / str(job), job_of("gpipe", 2, microbatches))
    finished(tmp_path / "2", job_of("gpipe", 2, 2, layers=3))  # another model
    finished(tmp_path / "3", status="failed")
    (tmp_path / "comparison.json").write_text("[]")
    assert main([str(tmp_path / "0")]) == 0
    said = capsys.readouterr().out
    assert f"With the costs of {tmp_path.resolve() / '1'}. Samples of a micro-batch that were measured: 8, 16." in said
    several = f"{tmp_path} is the folder of several runs: give one of them, such as {tmp_path / '0'}"
    assert several in refused([str(tmp_path), "--microbatches", "8"], capsys)
    assert several in refused([str(tmp_path), str(tmp_path / "0")], capsys)
    (tmp_path / "comparison.json").unlink()
    assert several in refused([str(tmp_path)], capsys)  # runs that are no sweep


def test_a_sweep_is_compared_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job, microbatches in enumerate((4, 8)):
        finished(tmp_path / str(job), job_of("gpipe", 2, microbatches))
    (tmp_path / "multirun.yaml").write_text("")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said == f"{(tmp_path / 'comparison.txt').read_text()}\n{tmp_path / 'comparison.html'}\n"
    assert [row["microbatches"] for row in json.loads((tmp_path / "comparison.json").read_text())] == [4, 8]
    assert "2 jobs: 2 completed" in (tmp_path / "comparison.html").read_text()


@pytest.mark.slow
def test_a_run_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = finished(tmp_path / "1"), finished(tmp_path / "2", job_of(layers=2))
    assert f"{two} says nothing of {one}: its model has other layers (4 instead of 2)" in refused(
        [str(one), str(two)], capsys
    )
    other = finished(tmp_path / "3", precision="bf16")
    assert "its precision is different" in refused([str(one), str(other)], capsys)
    wider = finished(tmp_path / "4", model={"_target_": "models.mlp", "loss": {}, "width": 3})
    assert "its model.width is different" in refused([str(wider), str(one)], capsys)


def test_folders_without_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in refused([str(tmp_path / "nowhere")], capsys)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no readable summary.json" in refused([str(empty)], capsys)
    failed = finished(tmp_path / "failed", status="failed")
    assert "failed (it broke): give one that completed" in refused([str(failed)], capsys)
    plan = tmp_path / "plan"
    plan.mkdir()
    (plan / "summary.json").write_text('{"status": "completed", "mode": "plan"}')
    assert "nothing was measured" in refused([str(plan)], capsys)
    run = finished(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"asynchronous": {}, "schedule": "pipedream"}))
    assert "asynchronous (schedule pipedream)" in refused([str(run)], capsys)
    (run / "summary.json").write_text(json.dumps(summary | {"data_parallel": {"mode": "async"}}))
    assert "asynchronous replicas (data_parallel.mode=async)" in refused([str(run)], capsys)
    old = finished(tmp_path / "old")
    (old / "costs.json").write_text('{"version": 0}')
    assert "has version 0" in refused([str(old)], capsys)
    (old / "costs.json").unlink()
    assert "run it again with trace.every=1" in refused([str(old)], capsys)


def test_a_misspelled_schedule_and_an_unwritable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(finished(tmp_path / "run"))
    assert "no synchronous schedule 'zbv'; there are: " in refused([run, "--schedule", "zbv"], capsys)
    assert main([run, "--json", str(tmp_path / "no" / "file.json")]) == 2
    assert "file.json cannot be written" in capsys.readouterr().err


def test_a_short_last_batch_tells_the_size_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of, short, start = job_of("gpipe", 2, 4), recorded.job("gpipe", 2, 2).compute, 0
    record, _ = recorded.recorder(of, tmp_path, progress=False)
    for step, samples in enumerate((64, 64, 64, 8)):  # micro-batches of 16, and of 4
        program = of.compute if samples == 64 else short
        timeline = recorded.measured(program, recorded.costs(program), step=MS, start=start)
        start = int(timeline.windows.max())
        sizes = {"samples": samples, "microbatches": program.microbatches}
        for each in recorded.step_records(of, step, timeline, **sizes):
            record(each)
    record.finish("completed")
    (tmp_path / "config.json").write_text(json.dumps(asdict(of.settings)))
    assert main([str(tmp_path), "--microbatches", "8"]) == 0
    said = capsys.readouterr().out
    assert "Samples of a micro-batch that were measured: 4, 16." in said
    assert "pipeline.microbatches=8" in said and "55.0" in said  # as long for 8 samples as for 16


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.report", str(finished(tmp_path / "run"))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before anything is written: the answer takes longer than that
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


@pytest.mark.slow
def test_it_answers_without_torch_and_says_how_it_is_used(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    code = "import sys; sys.modules['torch'] = sys.modules['hydra'] = None\n"
    code += f"from engine.report.__main__ import main; sys.exit(main([{str(run)!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "this run" in done.stdout
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0


@pytest.mark.slow
def test_a_real_run_answers(engine: Engine) -> None:
    """Of layers that sleep; their times are not looked at, only what they add up to."""
    listed = "[1,1,2,2]"
    costs = [f"model.{part}_ms={listed}" for part in ("forward", "input_backward", "weight_backward")]
    keys = ["model=sleep", "data=synthetic", "data.shape=[16]", "launch=threads", "schedule=zb_h1", "eval.every=0"]
    done = engine(*keys, *costs, "train.steps=4", "train.global_batch_size=8", "hydra.run.dir=run")
    assert done.code == 0, done.err
    assert f"-m engine.report {Path('run').absolute()}  # " in done.out
    assert main(["run", "--json", "answer.json"]) == 0
    found = json.loads(Path("answer.json").read_text())
    costs_of = json.loads(Path("run/costs.json").read_text())
    forward = [layer["forward"] for layer in costs_of["layers"]]
    assert min(forward[2:]) > max(forward[:2]) / 2 > 0  # they sleep twice as long
    predicted = {each["scenario"]["words"]: each for each in found["predictions"]}
    assert {"gpipe", "1f1b", "recompute all", "free transfers"} <= set(predicted)
    assert predicted["gpipe"]["notes"] == []  # backwards in halves were measured, and make whole ones
    computed = sum(costs_of["duration"][0][kind][stage] for kind in (0, 2, 3) for stage in (0, 1))
    assert found["baseline"]["step"] > 4 * computed / 2  # four micro-batches on two ranks
    assert found["baseline"]["memory"] == pytest.approx(found["measured"]["memory"], rel=0.05)
    assert predicted["naive"]["step"] > found["baseline"]["step"]


@pytest.mark.slow
def test_a_real_run_with_a_divided_optimizer_answers(engine: Engine) -> None:
    """Parameters arrive late: that is in its costs, and in what is predicted of itself."""
    keys = ["model=mlp", "data=synthetic", "launch=threads", "pipeline.ranks=1", "data_parallel.replicas=2"]
    late = ["shard_optimizer=true", "delay.links=[[0,1,20],[1,0,20]]", "threads_per_worker=1"]
    done = engine(*keys, *late, "train.steps=4", "eval.every=0", "hydra.run.dir=run")
    assert done.code == 0, done.err
    costs = json.loads(Path("run/costs.json").read_text())
    assert costs["gathered"] and costs["gather"][0] >= 0.02 and costs["threads"] == 1
    assert main(["run", "--json", "answer.json", "--schedule", "gpipe"]) == 0
    found = json.loads(Path("answer.json").read_text())
    assert found["baseline"]["step"] > costs["reduce"][0] + costs["gather"][0]
    assert found["baseline"]["memory"] == pytest.approx(found["measured"]["memory"], rel=1e-3)


def test_workers_with_other_threads_compute_at_another_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = finished(tmp_path / "1", threads_per_worker=None), finished(tmp_path / "2", threads_per_worker=4)
    assert main([str(one), str(two)]) == 0  # however they came to be as many
    capsys.readouterr()
    costs = json.loads((two / "costs.json").read_text())
    (two / "costs.json").write_text(json.dumps(costs | {"threads": 4}))
    (one / "costs.json").write_text(json.dumps(costs | {"threads": 2}))
    assert "its workers have other threads (4 instead of 2)" in refused([str(one), str(two)], capsys)


def test_a_program_from_a_file_is_read_from_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that the run was given may be gone, or have changed."""
    of = job_of("1f1b", 2, 4)
    folder = finished(tmp_path / "run", of)
    (folder / "program.csv").write_text(to_csv(of.compute))
    costs = json.loads((folder / "costs.json").read_text())
    given = {"schedule": "csv", "options": {"path": "gone.csv"}}
    (folder / "costs.json").write_text(json.dumps(costs | given))
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{folder}: csv, 2 ranks, 4 micro-batches; ") and "(+0.0 %)" in said
    assert "schedule=gpipe" in said


@pytest.mark.parametrize("lacking", ["layers", "duration", "ranks"])
def test_costs_that_are_not_whole_are_refused(lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished(tmp_path / "run")
    costs = json.loads((folder / "costs.json").read_text())
    del costs[lacking]
    (folder / "costs.json").write_text(json.dumps(costs))
    assert f"{folder} are not those of a whole run" in refused([str(folder)], capsys)
    (folder / "summary.json").write_text('{"status": "completed"}')
    assert "are not those of a whole run" in refused([str(folder)], capsys)


@pytest.mark.process
@pytest.mark.slow
def test_its_reader_may_go(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -m engine.report {folder} | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
