"""Law 1 for schedules with several stages per rank, with split backwards, and from files: as one plain process."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ADAM, SGD, Ran, plain, run_threads, settings
from peer_programs import KINDS, write
from torch import nn
from toys import Block, Layers

from engine.plan.schedules import SCHEDULES, build
from engine.plan.verify import peak_in_flight
from engine.plan.views.text import to_csv
from engine.settings import Eval, Settings

TRAINED: list[dict[str, Any]] = [
    {"name": "interleaved_1f1b"},
    {"name": "interleaved_1f1b", "chunks": 3},
    {"name": "looped_bfs"},
    {"name": "hanayo"},
    {"name": "hanayo", "waves": 2},
    {"name": "zb_h1"},
    {"name": "zb_h2"},
    {"name": "zb_v"},
    {"name": "v_half"},
    {"name": "v_min"},
    {"name": "dualpipe_v"},
]
each = pytest.mark.parametrize("schedule", TRAINED, ids=lambda s: "-".join(map(str, s.values())))
DEEP = {"_target_": "test_schedules_trained.deep", "loss": {"_target_": "toys.TokenLoss"}}


def deep(depth: int = 12, width: int = 8, classes: int = 5) -> Layers:
    """As many layers as three ranks of four chunks need."""
    blocks: Layers = [(f"block{i}", lambda: Block(width, width, 0.0)) for i in range(depth - 1)]
    return [*blocks, ("head", lambda: nn.Linear(width, classes))]


def settled(schedule: dict[str, Any], ranks: int, microbatches: int, replicas: int = 1, **changes: Any) -> Settings:
    base = settings("gpipe", ranks, microbatches, replicas, model=DEEP, clip_norm=0.05, **changes)
    return replace(base, schedule=schedule)


def close(ran: Ran, expected: dict[str, torch.Tensor]) -> None:
    found = ran.state()
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


@each
@pytest.mark.parametrize(("ranks", "microbatches"), list(itertools.product((1, 3), (1, 6))))
@pytest.mark.slow(keep=2, most=24)
def test_equals_one_process_bitwise(schedule: dict[str, Any], ranks: int, microbatches: int) -> None:
    """What test_parity_grid.py leaves out: one rank, one micro-batch, more chunks. In flight is what the plan says."""
    options = {key: value for key, value in schedule.items() if key != "name"}
    if SCHEDULES[schedule["name"]].complaint(ranks, microbatches, options):
        microbatches = 2 * ranks
    wanted = settled(
        schedule,
        ranks,
        microbatches,
        optimizer=ADAM,
        global_batch_size=14,
        data={"_target_": "toys.Tokens", "blank": 2},
    )
    expected, losses = plain(replace(wanted, schedule={"name": "gpipe"}), microbatched=True)
    ran = run_threads(wanted)
    assert ran.state().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in ran.state().items())
    assert ran.losses() == pytest.approx(losses, rel=1e-12)
    peaks = peak_in_flight(build(schedule["name"], ranks, microbatches, options))
    assert [ran.workers[rank].executor.peak_in_flight for rank in range(ranks)] == peaks


@each
@pytest.mark.slow(most=7)
def test_replicas_short_batches_and_evaluation(schedule: dict[str, Any]) -> None:
    """Two replicas with different shares, a short last batch, an evaluation after each step."""
    wanted = settled(
        schedule,
        3,
        6,
        2,
        optimizer=SGD,
        global_batch_size=19,
        data={"_target_": "toys.Tokens", "samples": 40, "evaluation": {"samples": 23}},
        eval=Eval(every=1),
    )
    expected, losses = plain(replace(wanted, schedule={"name": "gpipe"}), microbatched=True)
    ran = run_threads(wanted)
    close(ran, expected)
    assert all(torch.equal(a, b) for a, b in zip(ran.state(0).values(), ran.state(1).values(), strict=True))
    assert ran.losses() == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.slow(keep=1)
def test_programs_of_torch_train(name: str, kind: str, tmp_path: Path) -> None:
    """torch's looped BFS adds gradients in descending order: the same sum up to rounding."""
    path = tmp_path / "program.csv"
    write(name, kind, 2, 4, path)
    wanted = settled({"name": "csv", "path": str(path)}, 2, 4)
    expected, losses = plain(replace(wanted, schedule={"name": "gpipe"}), microbatched=True)
    ran = run_threads(wanted)
    close(ran, expected)
    assert ran.losses() == pytest.approx(losses, rel=1e-12)
    if name != "ScheduleLoopedBFS":
        assert all(torch.equal(value, expected[key]) for key, value in ran.state().items())


def test_a_short_batch_of_a_program_from_a_file(tmp_path: Path) -> None:
    """It is defined for one number of micro-batches only; a shorter batch goes forward and then backward."""
    path = tmp_path / "program.csv"
    path.write_text(to_csv(build("hanayo", 2, 4)))
    wanted = settled({"name": "csv", "path": str(path)}, 2, 4, data={"_target_": "toys.Tokens", "samples": 35})
    expected, _ = plain(replace(wanted, schedule={"name": "gpipe"}), microbatched=True)
    ran = run_threads(wanted)
    close(ran, expected)
    assert sorted(ran.job.steps) == [0, 3, 4]
