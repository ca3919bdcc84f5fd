"""Where temporary files go: a TMPDIR too deep for a Unix socket is no obstacle, and nothing is left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import environment

ROOT = Path(__file__).parents[2]


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
