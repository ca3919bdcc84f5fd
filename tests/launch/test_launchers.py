"""Under a launcher: whoever is awaited is named, attempts do not mix, a rank that dies is told of."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import misbehaving
import pytest
from command import LIMIT_S, ROOT
from misbehaving import TORCHRUN, Run

from engine import environment
from engine.transport import rendezvous

GONE = "went away without a word: its process was killed, or crashed"


hurt = misbehaving.hurt  # a fixture


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# ---- surroundings --------------------------------------------------------------------------------------------------

WORLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "LOCAL_WORLD_SIZE": "2"}
BAD = {
    "no number": ({"RANK": "abc"}, "RANK=abc is not a whole number of at least 0"),
    "a negative one": ({"RANK": "-1"}, "RANK=-1 is not a whole number"),
    "no world": ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a whole number of at least 1"),
    "outside": ({"RANK": "2"}, "RANK=2 does not exist where WORLD_SIZE=2: ranks are 0..1"),
    "no port": ({"MASTER_PORT": "http"}, "MASTER_PORT=http is not a whole number from 1 to 65535"),
    "too large a port": ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a whole number from 1 to 65535"),
    "more here than anywhere": ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 is not a whole number from 1 to 2"),
    "no number of a node": ({"SLURM_NODEID": "abc"}, "SLURM_NODEID=abc is not a whole number of at least 0"),
    "no name of a host": ({"MASTER_ADDR": "ä" * 80}, "is no name of a host"),
    "two lines": ({"RANK": "0\n1"}, "RANK=0 1 is not a whole number"),
    "no local number": ({"LOCAL_RANK": "one"}, "LOCAL_RANK=one is not"),
    "half": ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "without MASTER_ADDR, MASTER_PORT: set all"),
    "a rank alone": (dict.fromkeys(("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), ""), "RANK=0 in the environment"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_variables_that_cannot_be_are_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, said = BAD[case]
    for name, value in (WORLD | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        environment.check_launcher()
    assert said in str(refused.value)


def test_an_address_alone_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "somewhere")
    environment.check_launcher()
    assert not environment.joined()


def alone(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "engine", "model=mlp", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | WORLD | {"MASTER_PORT": str(free_port())} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1e3"}, "RANK=1e3 is not a whole number"),
        ({"MASTER_ADDR": ""}, "without MASTER_ADDR: set all"),
        ({}, "rank 1 of WORLD_SIZE=2 to come to MASTER_ADDR=127.0.0.1"),
    ],
    ids=lambda value: "-".join(value.values()) or "alone" if isinstance(value, dict) else "",
)
@pytest.mark.slow
def test_a_rank_in_bad_surroundings_says_so_in_a_line(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    code, out, err = alone(tmp_path, "timeout_s=1", **variables)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and said in err, err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, r"the store of rank 0 at MASTER_ADDR=127\.0\.0\.1 .*\(Connection refused\): waited 0\.5 s"),
        ({"MASTER_ADDR": "192.0.2.1"}, r"rank 0 cannot listen at MASTER_ADDR=192\.0\.2\.1"),
        ({"RANK": "1", "MASTER_ADDR": "nowhere.invalid"}, r"at MASTER_ADDR=nowhere\.invalid .*waited 0\.5 s"),
        ({}, r"rank 1 of WORLD_SIZE=2 to come to MASTER_ADDR=127\.0\.0\.1 .*waited 0\.5 s .* start every rank"),
    ],
)
@pytest.mark.slow(keep=2)
def test_ranks_that_cannot_meet_say_why(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (WORLD | {"MASTER_PORT": str(free_port())} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said) as refused:
        rendezvous.meet(0.5)
    assert "\n" not in str(refused.value) and capfd.readouterr().err == ""


@pytest.mark.slow
def test_what_answers_but_is_no_store_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without the stacks of torch's library."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in (WORLD | {"RANK": "1", "MASTER_PORT": str(server.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    end, _ = server.accept()
                    end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    end.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(
            ValueError, match=r"a store at .*: what answers there is none \(.*give the address and port"
        ):
            rendezvous.meet(0.5)
        server.shutdown(socket.SHUT_RDWR)
    assert capfd.readouterr().err == ""


def test_waiting_is_told_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + 1))
    monkeypatch.setattr(rendezvous, "time", clock)
    patience = rendezvous.Deadline(35, told.append, begun=100.0, told=100.0)
    with pytest.raises(ValueError, match=r"^rank 7: waited 35 s \(timeout_s\); start it$"):
        while True:
            patience.wait("rank 7", "start it")
    assert told == [f"waiting for rank 7 ({s} s of at most 35 s)" for s in (11, 22, 33)]


# ---- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_last_action(hurt: Run) -> None:
    hurt.start("model.what=sleep", prefix=TORCHRUN)
    os.kill(hurt.pid_of_second(), signal.SIGKILL)
    code, _, err = hurt.end()
    message = f"rank 1 (stage 1, micro-batch 0, in 1F0) {GONE}"
    assert code != 0 and f"error: {message}" in err, err
    assert hurt.file("error.txt") == f"{message}\n"
    assert (hurt.summary["status"], hurt.summary["error"]) == ("failed", message)
    hurt.assert_gone()


@pytest.mark.process
@pytest.mark.slow
def test_the_death_of_the_rank_that_reports_is_told_by_the_others(hurt: Run) -> None:
    hurt.start("model.what=sleep", prefix=TORCHRUN)
    second = hurt.pid_of_second()
    first = [pid for pid in _ranks_of(second) if pid != second]
    assert len(first) == 1
    os.kill(first[0], signal.SIGKILL)
    code, _, err = hurt.end()
    assert code != 0, err
    assert re.fullmatch(rf"rank 0 \(stage 0, .*in 0.*\) {GONE}\n", hurt.file("error.txt")), hurt.file("error.txt")
    what = {"mode": "train", "schedule": "gpipe", "ranks": 2, "microbatches": 4, "replicas": 1}
    assert hurt.summary == {"status": "failed", "error": hurt.file("error.txt").strip()} | what
    hurt.assert_gone()


def _ranks_of(pid: int) -> list[int]:
    """The processes that the parent of `pid`, a launcher, has started."""
    parent = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    return [int(each) for each in Path("/proc", str(parent), "task", str(parent), "children").read_text().split()]


@pytest.mark.process
@pytest.mark.slow
def test_an_interrupted_launcher_is_no_failure(hurt: Run) -> None:
    hurt.start("model.what=sleep", prefix=TORCHRUN)
    hurt.pid_of_second()
    hurt.process.send_signal(signal.SIGTERM)
    _, _, err = hurt.end()
    assert "interrupted by SIGTERM" in err, err
    assert hurt.summary["status"] == "interrupted"
    assert not list(hurt.folder.glob("runs/*/*/error.txt"))
    hurt.assert_gone()


@pytest.mark.slow
@pytest.mark.process
def test_ranks_whose_launcher_is_gone_end_and_say_so(hurt: Run) -> None:
    hurt.start("model.what=sleep", prefix=TORCHRUN)
    hurt.pid_of_second()
    hurt.process.kill()
    hurt.assert_gone(LIMIT_S)
    assert hurt.summary["status"] == "failed" and "Traceback" not in hurt.file("error.txt")
    assert hurt.summary["error"].startswith("the launcher went away, and its store with it (")


BROKEN = (
    "def __getitem__(self, i):\n",
    """def __getitem__(self, i):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and i == 20:
            raise OSError("no such sample")
""",
)


@pytest.mark.process
@pytest.mark.slow
def test_the_second_attempt_trains_in_a_folder_of_its_own(hurt: Run) -> None:
    """Its ranks meet each other, not what the first attempt left in the launcher's store."""
    code_file = hurt.folder / "mine.py"
    code = code_file.read_text()
    assert BROKEN[0] in code
    code_file.write_text(code.replace(*BROKEN))
    restarts = (*TORCHRUN[:-2], "--max-restarts=1", *TORCHRUN[-2:])
    code, out, err = hurt.run("hydra.run.dir=kept", "data.shuffle=false", prefix=restarts)
    assert code == 0, out + err
    assert out.count("attempt 1 of the launcher: this run's folder is kept-attempt1\n") == 1, out
    first, second = (hurt.folder / name / "summary.json" for name in ("kept", "kept-attempt1"))
    assert '"failed"' in first.read_text() and '"completed"' in second.read_text()
    assert "OSError: no such sample" in (hurt.folder / "kept" / "error.txt").read_text()
    hurt.assert_gone()


PLAIN = """
import torch, engine.distributed as together
world = together.init(timeout_s=60)
value = torch.tensor([1.0 + world.rank])
together.broadcast_parameters({"value": value})
print(together.size(), value.item())
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_plain_loop_meets_at_rank_0_s_own_store(tmp_path: Path) -> None:
    """Where no launcher keeps one."""
    started = os.environ | {"PYTHONPATH": str(ROOT)} | WORLD | {"MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN],
            env=started | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=LIMIT_S)
        assert (rank.returncode, out) == (0, "2 1.0\n"), err
