"""Real runs that are hurt: by the user's code, by signals, by a launcher. What they say last, and what they leave."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time

import command
import misbehaving
import pytest
from command import Engine
from misbehaving import GIVEN, GONE_S, TORCHRUN, Run, last_line

from engine.cli.config import from_plain
from engine.cli.run import REFUSED
from engine.prepare.devices import choose

engine = command.engine  # a fixture
hurt = misbehaving.hurt  # a fixture


# ---- failures in a worker ------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(("launch", "loaders"), [("processes", 0), ("processes", 1), ("threads", 0)])
@pytest.mark.slow(most=2)
def test_an_exception_is_the_last_thing_said(launch: str, loaders: int, hurt: Run) -> None:
    code, _, err = hurt.run("model.what=raise", f"launch={launch}", f"data.workers={loaders}")
    message = "rank 1 (stage 1, micro-batch 2, in 1F2) failed: ArithmeticError: the user's own mistake"
    assert (code, last_line(err)) == (1, f"error: {message}"), err
    assert hurt.file("error.txt").splitlines()[0] == message
    assert "in forward" in hurt.file("error.txt")
    assert hurt.summary["status"] == "failed"
    hurt.assert_gone()


@pytest.mark.process
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGSEGV])
@pytest.mark.slow(most=2)
def test_a_killed_worker_is_named(signum: signal.Signals, hurt: Run) -> None:
    hurt.start("model.what=sleep")
    os.kill(hurt.pid_of_second(), signum)
    start = time.monotonic()
    code, _, err = hurt.end()
    hurt.assert_gone(GONE_S - (time.monotonic() - start))
    said = last_line(err)
    assert code == 1 and said.startswith("error: rank 1") and f"was killed by {signum.name}" in said, err
    assert said.startswith("error: rank 1 (stage 1, micro-batch "), err
    assert hurt.file("error.txt").startswith("rank 1")


FROZEN = {
    "freeze at start": ([], "rank 1 went silent"),
    "freeze in micro-batch 2": ([], "rank 1 (stage 1, micro-batch 2, in 1F2) went silent"),
    "freeze in micro-batch 2, in the replica group": (
        ["pipeline.ranks=1", "data_parallel.replicas=2"],
        "rank 1 (replica 1, pipeline rank 0, stage 0, micro-batch 2, in 0F2) went silent",
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("when", FROZEN)
@pytest.mark.slow(most=2)
def test_a_frozen_worker_is_named(when: str, hurt: Run) -> None:
    arguments, said = FROZEN[when]
    code, _, err = hurt.run(f"model.what={when.partition(',')[0]}", "timeout_s=3", *arguments)
    assert code == 1 and last_line(err).startswith(f"error: {said}; "), err
    hurt.assert_gone()


@pytest.mark.process
@pytest.mark.parametrize(
    ("signum", "code", "times"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1), (signal.SIGHUP, 129, 1)]
)
@pytest.mark.slow(most=2)
def test_an_interrupted_run_leaves_a_summary_and_no_process(signum: int, code: int, times: int, hurt: Run) -> None:
    """Also one whose user was impatient."""
    hurt.start("model.what=sleep", "data.workers=1")
    hurt.pid_of_second()
    for _ in range(times):
        hurt.process.send_signal(signum)
        time.sleep(0.05)
    ended, _, err = hurt.end()
    assert ended == code and err == f"interrupted by {signal.Signals(signum).name}\n", err
    assert hurt.summary["status"] == "interrupted"
    hurt.assert_gone()


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_fork_server_ends_the_run(hurt: Run) -> None:
    hurt.start("model.what=sleep")
    hurt.pid_of_second()
    os.kill(next(pid for pid, command in hurt.left().items() if "from multiprocessing.forkserver" in command), 9)
    code, _, err = hurt.end()
    hurt.assert_gone()
    assert code == 1 and "Traceback" not in err, err
    assert re.match(r"error: the fork server \(process \d+\) was killed by SIGKILL: it had started", last_line(err)), (
        err
    )


@pytest.mark.process
@pytest.mark.parametrize(("interrupts", "code"), [(False, 1), (True, 143)])
@pytest.mark.slow(most=1)
def test_a_deleted_run_folder_ends_the_run_in_one_line(interrupts: bool, code: int, hurt: Run) -> None:
    """Deleted in the middle of a run, which is then ended, or meets it by itself."""
    hurt.start(f"model.what={'sleep' if interrupts else 'delete'}")
    if interrupts:
        hurt.pid_of_second()
        (hurt.folder / "runs").rename(hurt.folder / "aside")  # at once: a writer may add a file meanwhile
        shutil.rmtree(hurt.folder / "aside", ignore_errors=True)
        hurt.process.terminate()
    ended, _, err = hurt.end()
    assert ended == code and "cannot be written into the folder" in err and err.count("\n") == 1, err
    assert err.startswith("interrupted by SIGTERM; " if interrupts else "error: ")
    hurt.assert_gone()


@pytest.mark.process
@pytest.mark.slow
def test_nothing_outlives_a_killed_parent(hurt: Run) -> None:
    hurt.start("model.what=sleep", "data.workers=1")
    hurt.pid_of_second()
    assert len(hurt.left()) >= 4  # parent, two workers, a loader
    hurt.process.kill()
    hurt.end()
    hurt.assert_gone()


# ---- refused by prepare --------------------------------------------------------------------------------------------

REFUSALS = {
    "pipeline.ranks=3": ["3 stages", "2 layers"],
    "model.split=[thrd]": ["thrd", "second"],
    "model._target_=mine.modle": ["mine.modle", "did you mean model"],
    "model._target_=broken.model": ["ZeroDivisionError: division by zero", "broken"],
    "+model.wath=raise": ["wath", "what"],
    "optimizer._target_=torch.optim.SDG": ["torch.optim.SDG", "SGD"],
    "allreduce.name=rink": ["allreduce.name=rink", "ring", "native"],
}


@pytest.mark.parametrize("override", REFUSALS)
@pytest.mark.slow(keep=2)
def test_what_only_the_model_can_tell_is_refused_too(override: str, hurt: Run, engine: Engine) -> None:
    (hurt.folder / "broken.py").write_text("1 / 0\n")
    said = engine(*GIVEN, "launch=threads", override)
    assert said.code == REFUSED, said.err
    assert len(said.err.strip().splitlines()) == 1 and said.err.startswith("error: "), said.err
    assert all(part in said.err for part in REFUSALS[override]), said.err
    assert hurt.summary["status"] == "failed"
    assert not list(hurt.folder.glob("**/events*")) and not (hurt.folder / "pid").exists()
    hurt.assert_gone()


def test_more_ranks_than_gpus_are_refused(hurt: Run) -> None:
    settings = from_plain(
        {
            "device": "cuda",
            "data_parallel": {"replicas": 8},
            "pipeline": {"ranks": 2, "microbatches": 1},
            "schedule": {"name": "gpipe"},
            "partition": {"name": "model"},
            **{group: {"_target_": "a.b"} for group in ("model", "data", "optimizer")},
        }
    )
    with pytest.raises(ValueError, match="device=cuda, but this host has 1 visible GPUs for 16 ranks"):
        choose(settings, {}, 1)


# ---- torchrun ------------------------------------------------------------------------------------------------------

LAUNCH = ("-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node=2", "--standalone", "-m", "engine")


@pytest.mark.process
@pytest.mark.parametrize("prefix", [TORCHRUN, LAUNCH], ids=["torchrun", "launch"])
@pytest.mark.slow(most=1)
def test_joins_what_a_launcher_started(prefix: tuple[str, ...], hurt: Run) -> None:
    code, out, err = hurt.run(prefix=prefix)
    assert code == 0, out + err
    assert hurt.summary["status"] == "completed" and hurt.summary["ranks"] == 2
    assert len(list(hurt.folder.glob("runs/**/events*"))) == 1
    hurt.assert_gone()


@pytest.mark.process
@pytest.mark.slow
def test_a_launcher_that_started_too_few_is_told(hurt: Run) -> None:
    code, _, err = hurt.run("data_parallel.replicas=2", prefix=TORCHRUN)
    assert code != 0
    assert err.count("are 4 ranks, but the launcher started 2") == 2, err
    hurt.assert_gone()


@pytest.mark.process
@pytest.mark.slow
def test_a_plan_under_torchrun(hurt: Run) -> None:
    code, out, err = hurt.run("mode=plan", prefix=TORCHRUN)
    assert code == 0 and out.count("rank 0 |") == 1, out + err


@pytest.mark.process
@pytest.mark.slow
def test_a_sweep_under_torchrun_is_refused(hurt: Run) -> None:
    code, _, err = hurt.run("pipeline.microbatches=1,2", prefix=(*TORCHRUN, "-m"))
    assert code != 0 and "without torchrun" in err, err


@pytest.mark.process
@pytest.mark.slow
def test_a_failing_rank_under_torchrun_is_reported_by_rank_0(hurt: Run) -> None:
    code, _, err = hurt.run("model.what=raise", prefix=TORCHRUN)
    message = "rank 1 (stage 1, micro-batch 2, in 1F2) failed: ArithmeticError: the user's own mistake"
    assert code != 0 and f"error: {message}" in err, err
    assert hurt.file("error.txt").splitlines()[0] == message
    hurt.assert_gone()
