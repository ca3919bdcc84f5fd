"""The table of a sweep: every job has its row, also the ones that failed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import recorded
from recorded import recorder, traced_run

from engine.folder.rows import read_rows
from engine.plan.choose import Choice
from engine.report.compare import comparison, write_comparison


def ran(folder: Path, of: recorded.Job, *overrides: str) -> None:
    folder.mkdir(parents=True)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in overrides))
    record, _ = recorder(of, folder)
    traced_run(record, 3)
    record.finish("completed")


def sweep(folder: Path) -> Path:
    """Jobs 0, 1, 2 and 10: the last of them failed, one left nothing."""
    ran(folder / "0", recorded.job("naive", 2, 4), "schedule=naive", "'model=sleep'")
    ran(folder / "1", recorded.job("gpipe", 2, 4), "schedule=gpipe", "'model=sleep'")
    (folder / "2").mkdir()
    (folder / "10").mkdir()
    failed = {"status": "failed", "error": "rank 1 failed: ValueError: no\nmore", "schedule": "1f1b", "ranks": 2}
    (folder / "10" / "summary.json").write_text(json.dumps(failed))
    (folder / "not-a-job.txt").write_text("")
    (folder / ".hidden").mkdir()
    return folder


def column(text: str, name: str) -> list[str]:
    """Cells below a head, by where the columns end; cells do not begin left of the column before."""
    lines = text.partition("\n\n")[0].splitlines()
    end = lines[0].index(name) + len(name)
    return [line[:end].split("  ")[-1].strip() for line in lines[1:]]


def test_every_job_has_a_row_in_order(tmp_path: Path) -> None:
    text = write_comparison(sweep(tmp_path))
    assert column(text, "job") == ["0", "1", "2", "10"]
    assert column(text, "schedule") == ["naive", "gpipe", "-", "1f1b"]
    assert column(text, "status") == ["completed", "completed", "unfinished", "failed"]
    assert column(text, "ideal") == ["50.0 %", "20.0 %", "-", "-"]
    assert column(text, "predicted") == ["50.0 %", "20.0 %", "-", "-"]
    assert column(text, "measured") == ["51.0 %", "22.6 %", "-", "-"]  # a millisecond of optimizer
    assert column(text, "step ms") == ["49.0", "31.0", "-", "-"]
    assert column(text, "samples/s") == [f"{64 / 0.049:.1f}", f"{64 / 0.031:.1f}", "-", "-"]
    assert column(text, "peak in flight")[:2] == ["2 1", "2 1"]
    assert "job 10: rank 1 failed: ValueError: no" in text and "more" not in text
    assert "job 2: left no summary.json: it is still running, or it was killed" in text
    assert column(text, "peak memory") == ["7.2 kB", "7.2 kB", "-", "-"]
    assert "Pareto front of step time against peak memory: job 1 (31.0 ms, 7.2 kB)." in text


def test_overrides_that_differ_are_shown(tmp_path: Path) -> None:
    rows = read_rows(sweep(tmp_path))[:2]
    assert rows[1]["overrides"] == ["schedule=gpipe", "model=sleep"]
    text = comparison(rows)
    assert "schedule=gpipe" in text and "model=sleep" not in text


def test_files_are_whole_and_agree_with_the_table(tmp_path: Path) -> None:
    text = write_comparison(sweep(tmp_path))
    assert (tmp_path / "comparison.txt").read_text() == text + "\n"
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["job"] for row in rows] == ["0", "1", "2", "10"]
    assert rows[1]["bubble"]["per_rank"][0]["compute"] == 0.024
    assert not list(tmp_path.glob(".*.part"))
    assert write_comparison(tmp_path) == text  # its own files are no jobs


def test_rows_can_be_given(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [{"job": "a", "status": "interrupted", "schedule": "gpipe", "step_time": None}]
    text = write_comparison(tmp_path, given)
    assert column(text, "status") == ["interrupted"] and column(text, "step ms") == ["-"]


def test_jobs_may_lie_deeper(tmp_path: Path) -> None:
    """As with hydra.sweep.subdir; what holds no job is none."""
    ran(tmp_path / "b" / "lr=0.1" / "0", recorded.job("gpipe", 2, 4), "schedule=gpipe")
    ran(tmp_path / "a" / "10", recorded.job("1f1b", 2, 4), "schedule=1f1b")
    ran(tmp_path / "a" / "9", recorded.job("naive", 2, 4), "schedule=naive")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "plot.png").write_text("")
    (tmp_path / "notes" / "round").symlink_to(tmp_path)
    text = write_comparison(tmp_path)
    assert column(text, "job") == ["a/9", "a/10", "b/lr=0.1/0"]
    assert column(text, "status") == ["completed"] * 3
    page = (tmp_path / "comparison.html").read_text()
    assert 'href="./b/lr%3D0.1/0/report.txt"' in page and "./a/9/report.txt" in page


def test_a_sweep_without_jobs_is_a_head(tmp_path: Path) -> None:
    assert len(write_comparison(tmp_path).splitlines()) == 1


def test_a_summary_that_is_not_one_does_not_stop_the_table(tmp_path: Path) -> None:
    for number, content in enumerate(["{", ""]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "summary.json").write_text(content)
    assert column(write_comparison(tmp_path), "status") == ["failed"] * 2


def test_planned_jobs_show_what_was_simulated(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    summary = {"status": "completed", "mode": "plan", "schedule": "1f1b", "ranks": 2, "microbatches": 4, "replicas": 1}
    choice = asdict(Choice("1f1b", 15, 15, 0.2, 0.2, peak=2, transfers=8))
    plan = {"bubble_fraction": 0.2, "choice": choice, "per_rank": [{"peak_in_flight": 2}, {"peak_in_flight": 1}]}
    (tmp_path / "0" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "0" / "plan.json").write_text(json.dumps(plan))
    assert column(write_comparison(tmp_path), "transfers") == ["8"]
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "summary.json").write_text(json.dumps({"status": "completed", "mode": "train"}))
    text = write_comparison(tmp_path)  # a sweep over the mode itself
    assert column(text, "predicted") == ["20.0 %", "-"] and column(text, "measured") == ["-", "-"]
    assert column(text, "peak in flight") == ["2 1", "-"]
    (tmp_path / "1" / "summary.json").unlink()
    ran(tmp_path / "2", recorded.job("gpipe", 2, 4))  # a summary of training tells no mode
    text = write_comparison(tmp_path)
    assert column(text, "step ms") == ["-", "-", "31.0"] and column(text, "predicted") == ["20.0 %", "-", "20.0 %"]
