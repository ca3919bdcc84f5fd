"""Every synchronous schedule once in processes of its own: one sweep, whose files then have to tell what happened."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command import engine_process
from harness import plain
from PIL import Image
from test_parity_grid import NEEDS, SYNCHRONOUS

from engine.categories import NAMES
from engine.cli.config import from_plain
from engine.plan.features import SPLIT

RANKS, MICROBATCHES = 2, 4
LIMIT_S = 280.0  # a hang; it takes a tenth
MODEL = ["model=mlp", "model.features=16", "model.hidden=8", "model.depth=8", "data=synthetic", "data.shape=[16]"]
RUN = ["data.samples=64", "train.steps=3", "train.global_batch_size=10", "precision=fp64", "device=cpu"]
RUN += ["optimizer=sgd", "lr_scheduler=none"]
SIZES = [f"pipeline.ranks={RANKS}", f"pipeline.microbatches={MICROBATCHES}", "threads_per_worker=1", "timeout_s=60"]
VEE = [name for name in SYNCHRONOUS if name in ("zb_v", "v_half", "v_min", "dualpipe_v", "hanayo")]

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
each = pytest.mark.parametrize("schedule", SYNCHRONOUS)


class Job:
    """What one run left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = self.json("summary.json")

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def spans(self, pattern: str) -> Counter[tuple[int, str]]:
        """(rank, name) of the traced step's spans whose whole name matches; the critical path has a process beyond."""
        found = (e for e in self.json("trace.json")["traceEvents"] if e["ph"] == "X" and e["pid"] < RANKS)
        return Counter((event["pid"], event["name"]) for event in found if re.fullmatch(pattern, event["name"]))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("sweep")
    arguments = ["-m", f"schedule={','.join(SYNCHRONOUS)}", *MODEL, *RUN, *SIZES, f"hydra.sweep.dir={folder / 'jobs'}"]
    process = engine_process(arguments, folder)
    try:
        _, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    return {name: Job(folder / "jobs" / str(number)) for number, name in enumerate(SYNCHRONOUS)}


@each
@pytest.mark.slow
def test_the_losses_are_those_of_one_process(schedule: str, jobs: dict[str, Job]) -> None:
    job = jobs[schedule]
    _, losses = plain(from_plain(job.json("config.json")), microbatched=True)
    assert (job.summary["status"], job.summary["schedule"], job.summary["steps"]) == ("completed", schedule, 3)
    assert job.summary["loss"]["first"] == pytest.approx(losses[0], rel=1e-12)
    assert job.summary["loss"]["last"] == pytest.approx(losses[-1], rel=1e-12)
    assert job.summary["evaluation"]["samples"] == 64
    assert job.summary["evaluation"]["loss"] == pytest.approx(jobs["gpipe"].summary["evaluation"]["loss"], rel=1e-12)


@each
@pytest.mark.slow
def test_the_trace_shows_the_program_and_its_messages(schedule: str, jobs: dict[str, Job]) -> None:
    """Each computation of the plan once, on its rank, W too; a SEND and a RECV for each message, and no other."""
    job = jobs[schedule]
    plan = job.json("plan.json")
    listed = [(rank, re.findall(r"\d+[A-Z_]+\d*", cell)) for rank, row in enumerate(plan["lowered"]) for cell in row]
    planned = Counter((rank, name) for rank, names in listed for name in names if "OVERLAP" not in name)
    for pattern in (r"\d+[FBIW]\d+", r"\d+(SEND|RECV)_[FB]\d+"):
        expected = Counter({at: n for at, n in planned.items() if re.fullmatch(pattern, at[1])})
        assert job.spans(pattern) == expected
    ops = {re.sub(r"\d", "", name) for _, name in job.spans(r"\d+[FBIW]\d+")}
    assert ("W" in ops) == (SPLIT in NEEDS[schedule])
    assert plan["transfers"] == sum(job.spans(r"\d+SEND_[FB]\d+").values())


@each
@pytest.mark.slow(keep=5)
def test_report_picture_and_memory(schedule: str, jobs: dict[str, Job]) -> None:
    job = jobs[schedule]
    summary, plan = job.summary, job.json("plan.json")
    assert summary["peak_in_flight"] == [rank["peak_in_flight"] for rank in plan["per_rank"]]
    assert all(peak > 0 for peak in summary["peak_activation_bytes"])
    for rank in summary["bubble"]["per_rank"]:
        window = sum(rank[name] for name in NAMES)
        assert 0 < rank["compute"] < window
        assert 0 <= rank["bubble"] < 1  # the mean of shares: on a busy machine far from the share of means
    assert all(0 <= summary["bubble"][name] < 1 for name in ("ideal", "predicted", "measured"))
    with Image.open(job.folder / "timeline.png") as picture:
        assert picture.width > 100 and len(picture.convert("RGB").getcolors(1 << 24)) > 3
    assert schedule in (job.folder / "report.txt").read_text()
    assert len(list(job.folder.glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("schedule", VEE)
def test_nothing_is_sent_where_two_stages_share_a_rank(schedule: str, jobs: dict[str, Job]) -> None:
    """Two ranks hold stages 0 and 3, 1 and 2: stage 1 hands over to stage 2 on its own rank."""
    job = jobs[schedule]
    assert job.json("plan.json")["placement"] == [0, 1, 1, 0]
    crossing = {f"{s}SEND_F{m}" for s in (0, 2) for m in range(4)} | {f"{s}SEND_B{m}" for s in (1, 3) for m in range(4)}
    assert {name for _, name in job.spans(r"\d+SEND_[FB]\d+")} == crossing
    whole = jobs["interleaved_1f1b"].summary["bytes_sent_between_stages"]  # three edges of equal size, not two
    assert 3 * sum(job.summary["bytes_sent_between_stages"]) == 2 * sum(whole)
