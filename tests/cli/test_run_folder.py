"""A run folder that goes away, or takes no more, during a run: one line says so, and the run ends as it should."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import recorded
from recorded import log, step_records

from engine.cli import run
from engine.files import UnwritableError
from engine.launch import interrupt
from engine.launch.failure_report import Outcome
from engine.report.recorder import Recorder
from engine.report.tensorboard.board import Board

OUTCOMES = [
    Outcome("completed"),
    Outcome("failed", "rank 1 failed: ArithmeticError: x", 1, "Traceback ..."),
    Outcome("interrupted", "interrupted by SIGTERM", 143),
]


def recorder(folder: Path) -> tuple[Recorder, io.StringIO]:
    console = io.StringIO()
    return Recorder(recorded.job(), folder, console=console), console


def delete(folder: Path) -> None:
    """Away with the folder at once: a writer may add a file while what is in it is being removed."""
    aside = folder.with_name(f"{folder.name} aside")
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def record_steps(record: Recorder, steps: int = 3) -> None:
    for step in range(steps):
        for line in step_records(record.job, step):
            record(line)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.status)
@pytest.mark.parametrize("how", ["deleted", "full"])
def test_the_end_of_a_run_is_told_without_its_folder(
    how: str, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    record, console = recorder(folder)
    record_steps(record)
    if how == "deleted":
        delete(folder)
    else:
        monkeypatch.setattr(Path, "write_bytes", _full)
    ended = run.finish(folder, outcome, record.job.settings, record)
    assert "cannot be written into the folder" in (ended.error or "") and "\n" not in (ended.error or "")
    if outcome.status == "completed":
        assert (ended.status, ended.exit_code) == ("failed", 1)
    else:
        assert (ended.status, ended.exit_code) == (outcome.status, outcome.exit_code)
        assert (ended.error or "").startswith(outcome.error or "-")
    assert "steps 3" in console.getvalue()  # the report is on the screen at least


def _full(path: Path, content: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_ends_when_its_folder_is_deleted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """TensorBoard's writer has a thread of its own: what that meets is raised here, and told once."""
    folder = tmp_path / "run"
    folder.mkdir()
    record, _ = recorder(folder)
    record_steps(record, 1)
    delete(folder)
    with pytest.raises(UnwritableError, match=r"events.out.tfevents cannot be written .*No such file"):
        record_steps(record, 5)
    with pytest.raises(UnwritableError):
        record.finish("failed", "x")
    assert capfd.readouterr().err == ""


def test_the_hook_for_threads_is_given_back_and_hides_nothing_else(tmp_path: Path) -> None:
    before, seen = threading.excepthook, list[threading.ExceptHookArgs]()
    threading.excepthook = hook = seen.append
    try:
        board = Board(tmp_path)
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        board.close()
        assert len(seen) == 1 and threading.excepthook is hook
    finally:
        threading.excepthook = before


def test_a_log_that_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, _ = recorder(tmp_path)
    monkeypatch.setattr(Path, "open", lambda *_, **__: _full(tmp_path, b""))
    with pytest.raises(UnwritableError, match=r"engine.log cannot be written .*No space left"):
        record(log("hello"))


def test_an_unwritable_folder_is_no_traceback() -> None:
    error = UnwritableError(Path("/x/summary.json"), OSError(errno.EROFS, "Read-only file system"))
    assert run.outcome_of(error) == Outcome(
        "failed", "summary.json cannot be written into the folder /x: Read-only file system", 1
    )


def test_more_samples_in_a_batch_than_there_are_is_said(tmp_path: Path) -> None:
    from dataclasses import replace

    from engine.settings import Train

    record, console = recorder(tmp_path)
    for samples, told in ((64, 0), (63, 1)):
        job = replace(recorded.job(train=Train(global_batch_size=64)), train_samples=samples)
        run._describe(job, tmp_path, record)
        assert console.getvalue().count("every step takes all of them") == told
    record.finish("completed")
    assert json.loads((tmp_path / "config.json").read_text())["train"]["global_batch_size"] == 64


@pytest.mark.parametrize("where", ["on the path", "beside python", "nowhere"])
def test_the_line_to_copy_starts_the_tensorboard_of_this_python(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, other = tmp_path / "my bin" / "python", tmp_path / "other"
    for folder in (python.parent, other):
        folder.mkdir()
        (folder / "tensorboard").touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setenv("PATH", str(python.parent if where == "on the path" else other))
    if where == "nowhere":
        (python.parent / "tensorboard").unlink()
    told = {
        "on the path": "tensorboard",
        "beside python": f"'{python.parent}/tensorboard'",
        "nowhere": f"'{python}' -m tensorboard.main",
    }[where]
    record, console = recorder(tmp_path)
    record_steps(record)
    record.finish("completed")
    assert console.getvalue().splitlines()[-1] == f"{told} --logdir {tmp_path}"


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    import signal

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt.raising():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    with pytest.raises(KeyboardInterrupt, match="interrupted by SIGHUP"), interrupt.raising():
        os.kill(os.getpid(), signal.SIGHUP)
