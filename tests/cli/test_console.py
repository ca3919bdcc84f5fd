"""Whoever reads the output may go at any time; a run does not depend on it."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import LIMIT_S, ROOT, engine_process

from engine.console import Forgiving

SMALL = ["model=mlp", "data=synthetic", "train.steps=2", "train.global_batch_size=8", "eval.every=0", "data.samples=32"]
SMALL += ["model.features=16", "data.shape=[16]", "hydra.run.dir=mine"]


def test_a_stream_whose_reader_has_gone_leads_nowhere() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = Forgiving(io.TextIOWrapper(os.fdopen(writer, "wb", buffering=0), write_through=True))
    for _ in range(3):
        assert stream.write("text") == 4
        stream.flush()
    assert stream.fileno() == writer
    stream.close()


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


ENGINE = f"{shlex.quote(sys.executable)} -m engine"
GOING = {
    "head": f"set -o pipefail; {ENGINE} {' '.join(SMALL)} launch=threads | head -c 1",
    "closed": f"{ENGINE} {' '.join(SMALL)} <&- >&- 2>&-",
}


@pytest.mark.process
@pytest.mark.parametrize("how", GOING)
@pytest.mark.slow(most=1)
def test_a_run_outlives_its_readers(how: str, tmp_path: Path) -> None:
    done = shell(GOING[how], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"status": "completed"' in (tmp_path / "mine" / "summary.json").read_text()
    assert (tmp_path / "mine" / "timeline.png").exists()


def test_what_the_encoding_lacks_is_spelt_out(tmp_path: Path) -> None:
    done = shell(f"{ENGINE} mode=plan schedule=ümlaut", tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
    assert "schedule=\\xfcmlaut" in done.stderr


def test_a_start_in_a_deleted_folder_says_so(tmp_path: Path) -> None:
    done = shell(f"mkdir gone; cd gone; rmdir ../gone; {ENGINE} mode=plan", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the folder that this was started from has been deleted")
    assert done.stderr.count("\n") == 1


def test_an_interruption_while_the_engine_is_imported_is_one_line(tmp_path: Path) -> None:
    code = "import signal, sys; from engine import __main__ as entry; sys.meta_path.insert(0, entry)\n"
    code += "entry.find_spec = lambda *_: signal.raise_signal(signal.SIGINT); entry.leave(entry.run())"
    process = engine_process([], tmp_path, "-c", code)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (130, "interrupted by SIGINT\n")


@pytest.mark.parametrize("limit", [16, 31])
@pytest.mark.slow(keep=1)
def test_too_few_open_files_are_refused_at_once(limit: int, tmp_path: Path) -> None:
    done = shell(f"ulimit -n {limit}; {ENGINE} {' '.join(SMALL)}", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"may open {limit} files" in done.stderr and "ulimit -n 1024" in done.stderr


LINGERING = """
import sys, threading, time
from engine import __main__ as entry
entry.LEAVE_GRACE_S = 0.2
if sys.argv[1] == "lingers":
    threading.Thread(target=time.sleep, args=(600,), name="the user's own").start()
entry.leave(3)
"""


@pytest.mark.parametrize(("what", "told"), [("lingers", "not waited for: the user's own"), ("ends", "")])
def test_a_thread_left_running_does_not_keep_the_process(what: str, told: str, tmp_path: Path) -> None:
    process = engine_process([what], tmp_path, "-c", LINGERING)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3 and err.startswith(told) and bool(err) is bool(told), err
