"""Where temporary files go: a TMPDIR too deep for a Unix socket is no obstacle, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import launched
import pytest
from launched import job_of

from engine import environment
from engine.launch.launch import in_processes
from engine.launch.supervise import warm_up
from engine.telemetry.records import Record

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """The fork server lives as long as this process: start it before a test looks for children left behind."""
    warm_up()


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR of 200 characters."""
    folder = tmp_path / ("d" * (199 - len(str(tmp_path))))
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    tempfile.tempdir = None


@pytest.mark.process
@pytest.mark.slow
def test_a_run_with_a_loader_needs_no_short_temporary_folder(deep: Path, tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("engine-*"))
    arguments = ["model=mlp", "data=synthetic", "data.workers=1", "train.steps=2", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "engine", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(Path("/tmp").glob("engine-*")) <= before
    assert list(deep.iterdir()) == []


SAY = """
from multiprocessing import util
from engine.environment import keep_sockets_short
keep_sockets_short()
print(util.get_temp_dir())
"""


def test_the_folder_is_private_short_and_gone_at_the_end(deep: Path) -> None:
    code = SAY + "import os; print(oct(os.stat(util.get_temp_dir()).st_mode))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    folder, mode = done.stdout.split()
    assert len(folder) <= environment.LONGEST_TEMPORARY
    assert stat.S_IMODE(int(mode, 8)) == 0o700
    assert not os.path.exists(folder)  # noqa: PTH110


def test_a_short_one_is_left_as_it_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    environment_ = {**os.environ, "TMPDIR": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", SAY], cwd=ROOT, env=environment_, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("/tmp/pymp-")


def test_where_there_is_no_short_one_the_remedy_is_said(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SHORT_TEMPORARIES", (str(deep / "absent"),))
    with pytest.raises(ValueError, match="set TMPDIR to a folder with a path of at most 60 bytes"):
        environment.keep_sockets_short()


def _told_to_stop(record: Record) -> None:
    if record.kind == "ready":
        os.kill(os.getpid(), signal.SIGINT)


def _unable(record: Record) -> None:
    raise OSError("disk full")


def _nothing(record: Record) -> None:
    return None


@pytest.mark.process
@pytest.mark.parametrize(
    ("entry", "on_record", "status"),
    [
        (launched.good, _nothing, "completed"),
        (launched.killed, _nothing, "failed"),
        (launched.with_children, _told_to_stop, "interrupted"),
        (launched.good, _unable, "raised"),
    ],
    ids=["completed", "killed", "interrupted", "raised"],
)
@pytest.mark.slow(keep=2)
def test_the_folder_where_ranks_meet_goes_with_the_run(
    entry: Any, on_record: Callable[[Record], None], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "IN_MEMORY", str(tmp_path))
    seen: list[list[Path]] = []

    def hear(record: Record) -> None:
        seen.append(list(tmp_path.iterdir()))
        on_record(record)

    with pytest.raises(OSError, match="disk full") if status == "raised" else nullcontext():
        assert in_processes(job_of(2), hear, entry).status == status
    assert len(seen[0]) == 1 and list(tmp_path.iterdir()) == []
