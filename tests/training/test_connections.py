"""Which ranks meet, and how many files that takes: known before a worker exists, and true of the workers."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import LIMIT_S, Engine, engine, engine_process
from harness import settings
from workers import over_gloo, over_shared

from engine.cli import run
from engine.cli.attempts import CONFIG_NAME
from engine.launch import supervise
from engine.pipeline.communicators import Communicators
from engine.prepare.prepare import prepare
from engine.settings import AllReduceSettings
from engine.training import connections as module
from engine.training.connections import OWN, check_open_files, connections, files_needed
from engine.transport import Transport

__all__ = ["engine"]
OVER = {"shared_memory": over_shared, "gloo": over_gloo}
LAYERS = {"_target_": "toys.mlp", "loss": {"_target_": "toys.TokenLoss"}}
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "a pipeline": ("1f1b", 3, 1, {}),
    "wrapped around": ("interleaved_1f1b", 3, 1, {}),
    "rings": ("1f1b", 2, 3, {}),
    "the backend's sums": ("1f1b", 2, 3, {"allreduce": AllReduceSettings("native")}),
    "any two": ("gpipe", 1, 4, {"shard_optimizer": True}),
}


def open_now() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
@pytest.mark.parametrize("transport", OVER)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow(keep=2)
def test_files_are_counted_as_they_are_opened(case: str, transport: str) -> None:
    """All ranks are threads here: together they open what is counted for each, beside what a process has anyway."""
    schedule, ranks, replicas, given = CASES[case]
    given = {"launch": "processes", "transport": transport, "model": LAYERS, "global_batch_size": 24} | given
    job = prepare(settings(schedule, ranks, 6, replicas, **given), ".", ".")
    opened: list[int] = []
    all_are_there = threading.Barrier(job.world, action=lambda: opened.append(open_now()))
    done = threading.Barrier(job.world)

    def main(end: Transport) -> None:
        Communicators(connections(job), end)
        all_are_there.wait(LIMIT_S)
        done.wait(LIMIT_S)

    before = open_now()
    OVER[transport](job.world, main)
    needed = files_needed(job, connections(job))
    assert sorted(needed) == list(range(job.world))
    assert opened == [before + sum(needed.values()) - OWN * job.world]


@pytest.mark.parametrize(("limit", "refused"), [(81, True), (82, False), (10_000, False), (float("inf"), False)])
def test_the_largest_need_of_a_rank_decides(limit: float, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(
        settings("gpipe", 1, 1, 8, launch="processes", transport="shared_memory", shard_optimizer=True), ".", "."
    )
    found = connections(job)
    # 14 channels of 4 files each, 7 others in each of two groups, and a process's own 12
    assert set(files_needed(job, found).values()) == {14 * 4 + 2 * 7 + 12}
    monkeypatch.setattr(module, "open_files", lambda: limit)
    said = r"may open 81 files .* rank 0 needs 82 or more.* 14 channels.*ulimit -n 1024"
    with pytest.raises(ValueError, match=said) if refused else nullcontext():
        check_open_files(job, found)


@pytest.mark.parametrize("given", [{"launch": "threads"}, {"launch": "processes", "device": "cuda"}])
def test_other_ranks_open_other_files(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_files", lambda: 20)
    job = prepare(settings("1f1b", 2, 2, launch="threads"), ".", ".")
    check_open_files(replace_settings(job, given), connections(job))


def replace_settings(job: Any, given: dict[str, str]) -> Any:
    return replace(job, settings=replace(job.settings, **given))


SMALL = ["model=sleep", "data=synthetic", "data.shape=[4]", "train.steps=1", "eval.every=0", "model.forward_ms=0"]
SMALL += ["pipeline.ranks=1", "data_parallel.replicas=4", "shard_optimizer=true", "device=cpu"]


def test_too_few_files_are_refused_before_a_worker_starts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "warm_up", lambda: None)
    monkeypatch.setattr(module, "open_files", lambda: 41)
    said = engine(*SMALL)
    assert said.code == run.REFUSED and said.err.count("\n") == 1, said.err
    assert "may open 41 files" in said.err and "needs 42 or more" in said.err and "ulimit -n 1024" in said.err
    assert not (said.runs[0] / CONFIG_NAME).exists()


@pytest.mark.slow
def test_somewhat_more_files_are_enough(tmp_path: Path) -> None:
    """What is counted is not far from what is used: a channel has a segment or two besides."""
    limit = 42 + 2 * 6 + 6
    command = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); "
    command += "os.execv(sys.executable, [sys.executable, '-m', 'engine', *sys.argv[1:]])"
    process = engine_process(SMALL, tmp_path, "-c", command)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
