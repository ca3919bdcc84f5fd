"""What a run leaves behind, for every way it can end; and that no figure is averaged over the wrong thing."""

from __future__ import annotations

import json
import logging
import math
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import recorded
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from recorded import MS, costs, log, measured, recorder, step_records, traced_run, with_train
from tensorboards import event_files, read

from engine.account.records.gather import Evaluations, Step, Steps
from engine.account.records.nan_watch import LossNotFiniteError
from engine.account.replay.waterfall import BARS
from engine.categories import NAMES
from engine.files import UnwritableError, write_json, write_text
from engine.plan.schedules import build
from engine.report.tensorboard.board import Board
from engine.settings import Train
from engine.telemetry.records import Record


def gathered(of: recorded.Job, records: list[Record]) -> list[Step]:
    steps = Steps(of)
    return [step for step in map(steps.add, records) if step]


def evaluation(rank: int, samples: int, correct: int | None, step: int = 3) -> Record:
    meta = {"rank": rank, "step": step, "samples": samples, "loss_sum": 0.5 * samples, "loss_count": samples}
    return Record("evaluation", meta | {"correct": correct, "scored": None if correct is None else samples}, {})


# ---- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 4), (2, 2), (4, 1)])
def test_the_loss_is_over_what_was_counted_not_over_processes(ranks: int, replicas: int) -> None:
    """Lengths 3, 12, 2, 8 over the replicas: neither the ranks nor the replicas' means are averaged."""
    counts = {1: [25], 2: [15, 10], 4: [3, 12, 2, 8]}[replicas]
    sums = {1: [50.0], 2: [12.0, 38.0], 4: [6.0, 6.0, 8.0, 30.0]}[replicas]
    of = recorded.job("gpipe", ranks, 4, replicas)
    (step,) = gathered(of, step_records(of, losses=list(zip(sums, counts, strict=True))))
    assert step.loss == 2.0


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 3))
@pytest.mark.slow
def test_records_may_come_in_any_order(chance: random.Random, ranks: int, replicas: int) -> None:
    """A rank's own records stay in order; ranks run ahead of each other."""
    of = recorded.job("gpipe", ranks, 4, replicas)
    queues = [[step_records(of, step)[rank] for step in range(4)] for rank in range(of.world)]
    steps, found = Steps(of), []
    while any(queues):
        step = steps.add(chance.choice([queue for queue in queues if queue]).pop(0))
        found += [step] if step else []
    assert [step.index for step in found] == [0, 1, 2, 3]
    assert not steps._pending


def test_a_step_takes_the_largest_peak_the_sum_of_bytes_and_the_mean_window() -> None:
    of = recorded.job("gpipe", 2, 4, replicas=2)
    records = step_records(of, seconds=2.0)
    records[3].meta["window"][1] += 1_000_000_000
    records[2].meta["peak_in_flight"] = 9
    (step,) = gathered(of, records)
    assert step.peak_in_flight == [9, 1] and step.peak_activation_bytes == [100, 200]
    assert step.bytes_sent_between_stages == [2000, 4000]
    assert step.reduce_bytes_sent == 30
    assert step.seconds == pytest.approx(2.25)
    assert step.samples_per_second == pytest.approx(64 / 2.25)
    assert step.recorded is None


def test_nothing_scored_is_no_loss() -> None:
    of = recorded.job()
    (step,) = gathered(of, step_records(of, losses=[(0.0, 0)]))
    assert step.loss is None


def test_evaluations_are_put_together_over_replicas() -> None:
    of = recorded.job("gpipe", 2, 4, replicas=2)
    evaluations = Evaluations(of)
    assert evaluations.add(evaluation(1, 30, 20)) is None
    found = evaluations.add(evaluation(3, 10, 8))
    assert found is not None
    assert found.summary() == {"step": 3, "samples": 40, "loss": 0.5, "accuracy": 0.7}
    evaluations.add(evaluation(1, 30, None))
    found = evaluations.add(evaluation(3, 10, None))
    assert found is not None and found.accuracy is None


# ---- a whole run ---------------------------------------------------------------------------------------------------


def test_a_completed_run_leaves_everything(tmp_path: Path) -> None:
    of = recorded.job("1f1b", 2, 4)
    record, console = recorder(of, tmp_path)
    traced_run(record, 5)
    record(evaluation(1, 100, 90, step=5))
    record(log("hello"))
    summary = record.finish("completed")
    names = {"summary.json", "report.txt", "trace.json", "costs.json", "engine.log"}
    names |= {f"{name}.{form}" for name in ("timeline", "waterfall") for form in ("png", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == names | {event_files(tmp_path)[0].name}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    with Image.open(tmp_path / "timeline.png") as image:
        assert image.size[0] == 1400
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    said = console.getvalue()
    assert "5/5" in said and "loss=1" in said and "samples/s=" in said
    assert "evaluation after 5 steps: loss 0.5, accuracy 90.0 %, 100 samples" in said
    for words in ("compute", "drain", "ideal", "predicted", "measured", "the ideal bubble falls from 20.0 % to 11.1 %"):
        assert words in said
    *program, option, folder = shlex.split(said.splitlines()[-1])  # its path may have blanks, and is quoted then
    assert Path(program[-1]).stem == "tensorboard" and (option, folder) == ("--logdir", str(tmp_path))
    assert "block1" in (tmp_path / "report.txt").read_text()


def test_the_summary_has_its_schema(tmp_path: Path) -> None:
    of = recorded.job("gpipe", 2, 4, replicas=2)
    record, _ = recorder(of, tmp_path, progress=False)
    traced_run(record, 3, transfer=MS // 10)
    record(evaluation(1, 30, 20))
    record(evaluation(3, 10, 8))
    summary = record.finish("completed")
    assert list(summary) == [
        "status", "schedule", "ranks", "stages", "microbatches", "replicas", "global_batch_size", "steps",
        "traced_steps", "samples", "loss", "step_time", "samples_per_second", "bubble", "waterfall", "peak_in_flight",
        "peak_activation_bytes", "memory", "evaluation", "checkpoint", "allreduce", "data_parallel",
        "bytes_sent_between_stages", "bytes_sent_per_device", "weight_versions", "staleness", "asynchronous",
    ]  # fmt: skip
    assert summary["loss"] == {"first": 2.0, "last": 1.5, "not_finite_since": None} and summary["samples"] == 192
    assert [len(summary[key]) for key in ("peak_in_flight", "peak_activation_bytes", "bytes_sent_between_stages")] == [
        2
    ] * 3
    assert summary["evaluation"] == {"step": 3, "samples": 40, "loss": 0.5, "accuracy": 0.7}
    overlap = summary["allreduce"].pop("overlap")
    assert summary["allreduce"] == {"name": "ring", "bytes_sent_per_rank": 30, "exposed": 0.0}
    assert summary["global_batch_size"] == 64 and summary["bytes_sent_per_device"] == [1000, 2010, 1020, 2030]
    assert summary["memory"] == {
        "parameters": [3000, 4000], "gradients": [1500, 2000], "buckets": [0, 0], "optimizer_state": [6000, 8000],
        "activations": [100, 200], "total": [10600, 14200],
    }  # fmt: skip
    assert overlap["share"] is None and [(e["rank"], e["replica"]) for e in overlap["per_rank"]] == [
        (0, 0), (1, 0), (0, 1), (1, 1)
    ]  # fmt: skip
    assert all(
        list(each) == ["rank", "replica", "total", "hideable", "hidden", "share"] for each in overlap["per_rank"]
    )
    assert summary["bubble"]["ideal"] == pytest.approx(0.2) and summary["bubble"]["predicted"] == pytest.approx(0.2)
    nothing = {"waiting": 0.0, "share": 0.0, "reducing": 0.0}
    assert summary["data_parallel"] == {"mode": "sync", "barrier": [nothing] * 2}
    per_rank = summary["bubble"]["per_rank"]
    assert [(entry["rank"], entry["replica"]) for entry in per_rank] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for entry in per_rank:
        assert list(entry) == ["rank", "replica", *NAMES, "bubble"]
        total = sum(entry[name] for name in NAMES)
        assert total == pytest.approx(summary["step_time"]["median"])
        assert entry["bubble"] == pytest.approx(1 - entry["compute"] / total)
    assert summary["bubble"]["measured"] == pytest.approx(sum(e["bubble"] for e in per_rank) / 4)
    fall = summary["waterfall"]
    assert list(fall) == ["steps", *BARS, "measured", "replicas_alone"] and fall["steps"] == 2
    assert sum(fall[bar] for bar in BARS) == pytest.approx(fall["measured"])
    assert fall["measured"] == pytest.approx(summary["step_time"]["median"])
    assert fall["work"] == pytest.approx(per_rank[0]["compute"])


def test_waterfall_and_critical_path_are_in_the_report(tmp_path: Path) -> None:
    of = recorded.job("gpipe", 2, 4)
    record, _ = recorder(of, tmp_path, progress=False)
    traced_run(record, 2, costs(of.compute, slow=1))
    record.finish("completed")
    said = (tmp_path / "report.txt").read_text()
    rows = {
        line.split()[0]: line.split()[1:] for line in said.splitlines() if line.split()[:1] and line.split()[0] in BARS
    }
    assert rows["work"][0] == "48.00" and rows["imbalance"][0] == "18.00" and rows["optimizer"][0] == "1.00"
    assert "By cause: compute 78.0 ms (98.7 %), optimizer 1.0 ms (1.3 %)." in said
    assert "By rank: rank 0" in said and "1B0 on rank 1 12.0 ms" in said


def test_step_times_leave_out_the_first_step(tmp_path: Path) -> None:
    of = recorded.job()
    record, _ = recorder(of, tmp_path, progress=False)
    for step, seconds in enumerate([9.0, 1.0, 2.0, 6.0]):
        for line in step_records(of, step, window=[0, int(seconds * 1e9)]):
            record(line)
    summary = record.finish("completed")
    assert summary["step_time"] == {"median": 2.0, "min": 1.0, "max": 6.0}
    assert summary["samples_per_second"] == pytest.approx(3 * 64 / 9)
    assert summary["bubble"] == {"ideal": None, "predicted": None, "measured": None, "per_rank": []}
    assert summary["allreduce"]["exposed"] is None and summary["allreduce"]["overlap"] is None
    assert not (tmp_path / "trace.json").exists()
    assert "No step was traced" in (tmp_path / "report.txt").read_text()


def test_one_step_is_better_than_none(tmp_path: Path) -> None:
    record, _ = recorder(recorded.job(), tmp_path)
    traced_run(record, 1)
    summary = record.finish("completed")
    assert summary["step_time"]["median"] == pytest.approx(0.031)
    assert summary["bubble"]["measured"] == pytest.approx(1 - 24 / 31)


@pytest.mark.parametrize(("status", "error"), [("failed", "rank 1 failed: ValueError: no"), ("interrupted", None)])
def test_a_run_that_stops_early_keeps_its_steps(status: str, error: str | None, tmp_path: Path) -> None:
    of = recorded.job("gpipe", 2, 4)
    record, console = recorder(of, tmp_path)
    traced_run(record, 2)
    record(step_records(of, 2)[0])  # one rank was ahead
    summary = record.finish(status, error)
    assert (summary["status"], summary.get("error"), summary["steps"]) == (status, error, 2)
    assert [event.step for event in read(tmp_path).Scalars("train/loss")] == [0, 1]
    assert (tmp_path / "trace.json").exists() and f"{status}: gpipe" in console.getvalue()


@pytest.mark.parametrize("status", ["completed", "failed", "interrupted"])
def test_a_run_without_a_step_ends_cleanly(status: str, tmp_path: Path) -> None:
    record, console = recorder(recorded.job(), tmp_path)
    summary = record.finish(status, "it broke" if status == "failed" else None)
    assert summary["loss"] == {"first": None, "last": None, "not_finite_since": None} and summary["steps"] == 0
    left = {path.name.partition(".tfevents")[0] for path in tmp_path.iterdir()}
    assert left == {"summary.json"} | ({"events.out"} if status == "failed" else set())  # it is in the table of a sweep
    assert console.getvalue() == ""


def test_finishing_twice_changes_nothing(tmp_path: Path) -> None:
    record, console = recorder(recorded.job(), tmp_path)
    traced_run(record, 2)
    first, said = record.finish("failed", "x"), console.getvalue()
    assert record.finish("completed") is first
    assert console.getvalue() == said
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_printed_steps_are_on_the_disk_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("scalars", "flush"):
        original = getattr(Board, name)

        def noted(board: Board, *args: Any, original: Any = original, name: str = name) -> None:
            original(board, *args)
            done.append(name)

        monkeypatch.setattr(Board, name, noted)
    record, console = recorder(recorded.job(), tmp_path)
    traced_run(record, 5)
    assert "5/5" in console.getvalue()
    assert done.count("scalars") >= 5 and done[-2:] == ["scalars", "flush"]  # the last step is always printed
    assert [event.step for event in read(tmp_path).Scalars("train/loss")] == [0, 1, 2, 3, 4]
    record.finish("completed")
    assert len(event_files(tmp_path)) == 1


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_told_once_with_its_step(loss: float, tmp_path: Path) -> None:
    of = recorded.job()
    record, console = recorder(of, tmp_path)
    for step in range(4):
        for line in step_records(of, step, losses=[(loss if step >= 2 else 1.0, 4)]):
            record(line)
    summary = record.finish("completed")
    assert summary["status"] == "completed" and summary["loss"]["not_finite_since"] == 2
    told = [text for text in console.getvalue().splitlines() if "WARNING" in text]
    assert len(told) == 1 and f"the loss of step 2 (counted from 0) is {loss}" in told[0], told
    assert (tmp_path / "engine.log").read_text().count("the loss of step 2") == 1


def test_a_loss_that_is_not_finite_ends_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    of = recorded.job(train=Train(steps=5, global_batch_size=64, stop_on_nan=True))
    record, _ = recorder(of, tmp_path)
    with pytest.raises(LossNotFiniteError, match=r"the loss of step 0 .* is nan, and train.stop_on_nan ends the run"):
        for line in step_records(of, 0, losses=[(math.nan, 4)]):
            record(line)
    assert record.finish("failed", "the loss")["loss"]["not_finite_since"] == 0


def test_a_loss_that_is_no_number_leaves_valid_json(tmp_path: Path) -> None:
    of = recorded.job()
    record, console = recorder(of, tmp_path)
    for line in step_records(of, 0, losses=[(math.nan, 4)]):
        record(line)
    record.finish("completed")

    def refuse(word: str) -> Any:
        raise AssertionError(word)

    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)["loss"]["last"] is None
    said = console.getvalue()
    assert "loss nan -> nan (not finite since step 0)" in said


def test_short_batches_do_not_blur_peaks_and_bytes(tmp_path: Path) -> None:
    of = recorded.job("gpipe", 2, 4)
    record, _ = recorder(of, tmp_path, progress=False)
    traced_run(record, 2)
    short = build("gpipe", 2, 1)
    changes = {"peak_in_flight": 1, "bytes_sent_between_stages": 1, "reduce_bytes_sent": 1, "peak_activation_bytes": 1}
    for line in step_records(of, 2, measured(short, costs(short)), samples=5, microbatches=1, **changes):
        record(line)
    summary = record.finish("completed")
    assert summary["peak_in_flight"] == [2, 1] and summary["bytes_sent_between_stages"] == [1000, 2000]
    assert summary["bubble"]["ideal"] == pytest.approx(0.2) and summary["samples"] == 133
    assert summary["bubble"]["measured"] == pytest.approx((1 - 24 / 31 + 0.5) / 2)


def test_the_bar_knows_the_steps_of_all_epochs(tmp_path: Path) -> None:
    of = with_train(recorded.job(), steps=None, epochs=2, global_batch_size=100)
    assert of.train_samples == 640 and of.settings.train == Train(None, 2, 100)
    record, console = recorder(of, tmp_path)
    traced_run(record, 1)
    record.finish("interrupted")
    assert "1/14" in console.getvalue()


# ---- the log -------------------------------------------------------------------------------------------------------


def test_lines_of_every_rank_are_in_the_log(tmp_path: Path) -> None:
    of = recorded.job("gpipe", 2, 4, replicas=2)
    record, console = recorder(of, tmp_path)
    for rank in range(4):
        record(log(f"line of {rank}\nand more", rank))
    record(log("from above", None))
    record(Record("ready", {"rank": 2, "pid": 7, "device": "cpu", "threads": 3}, {}))
    said = (tmp_path / "engine.log").read_text()  # complete while the run goes on
    for rank in range(4):
        assert f"INFO    [rank {rank}] a.b: line of {rank}\n" in said
        assert f"[rank {rank}] a.b: and more\n" in said
    assert "[parent] a.b: from above" in said
    assert "[rank 2] engine: ready: process 7, device cpu, threads 3" in said
    assert console.getvalue() == ""
    record.finish("completed")


def test_warnings_reach_the_console_and_the_level_can_be_chosen(tmp_path: Path) -> None:
    record, console = recorder(recorded.job(), tmp_path)
    record(log("quiet"))
    record(log("mind", 1, logging.WARNING))
    assert console.getvalue() == "WARNING [rank 1] mind\n"
    record.finish("completed")
    record, console = recorder(recorded.job(), tmp_path, console_level=logging.INFO)
    record(log("quiet"))
    assert console.getvalue() == "INFO [rank 0] quiet\n"
    record.finish("completed")
    assert (tmp_path / "engine.log").read_text().count("quiet") == 2


def test_a_warning_does_not_tear_the_bar(tmp_path: Path) -> None:
    record, console = recorder(recorded.job(), tmp_path)
    traced_run(record, 1)
    record(log("mind", 1, logging.WARNING))
    line = next(line for line in console.getvalue().splitlines() if "mind" in line)
    assert line.rpartition("\r")[2] == "WARNING [rank 1] mind"
    record.finish("completed")


def test_errors_are_logged_with_their_traceback_and_left_to_others_to_print(tmp_path: Path) -> None:
    record, console = recorder(recorded.job(), tmp_path)
    meta = {"rank": 1, "type": "ValueError", "message": "no", "traceback": "Traceback\n  deep inside"}
    record(Record("error", meta, {}))
    record(Record("done", {"rank": 0}, {}))
    said = (tmp_path / "engine.log").read_text()
    assert "ERROR   [rank 1] engine: ValueError: no" in said and "[rank 1] engine:   deep inside" in said
    assert console.getvalue() == ""
    record.finish("failed", "no")


# ---- files ---------------------------------------------------------------------------------------------------------


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    write_text(tmp_path / "a", "new ü")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "new ü"
    with pytest.raises(TypeError):
        write_json(tmp_path / "a", {"x": object()})
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnwritableError, match=r"folder cannot be written into the folder .*: Is a directory"):
        write_text(tmp_path / "folder", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]
