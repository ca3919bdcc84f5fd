"""Ranks as threads of one process: what belongs to the process is changed by one at a time; one error stops all."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from harness import settings
from torch import Tensor, nn
from workers import HANG_S

from engine.launch.launch import in_threads
from engine.prepare.prepare import prepare
from engine.targets import prepare_import_path
from engine.telemetry.records import Record

SEEN: list[str] = []  # "rank 0 a" where layer `a` was computed in that thread, with values


def test_ranks_that_prepare_at_once_do_it_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Python's own function is a KeyError where two threads forget the same folder."""
    inside, most = [0], [0]

    def invalidate() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1

    monkeypatch.setattr(importlib, "invalidate_caches", invalidate)
    threads = [threading.Thread(target=prepare_import_path, args=(".",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert most == [1]


class Noted(nn.Linear):
    """Notes where it is computed. `failing`: the rank that raises; others wait in their second forward until its thread
    has come and gone."""

    def __init__(self, label: str, failing: str) -> None:
        super().__init__(6, 6)
        self.label, self.failing = label, failing

    def forward(self, value: Tensor) -> Tensor:
        own = threading.current_thread().name
        if own.startswith("rank "):
            SEEN.append(own)
            if own == self.failing:
                raise ArithmeticError("out of luck")
            if SEEN.count(own) == 2:
                end = time.monotonic() + HANG_S
                while self.failing not in SEEN or any(t.name == self.failing for t in threading.enumerate()):
                    assert time.monotonic() < end
                    time.sleep(0.01)
        return super().forward(value)


class Rows(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), index / 64), index % 6


def layers(count: int, failing: str) -> nn.Sequential:
    return nn.Sequential(*(Noted(str(number), failing) for number in range(count)))


@pytest.fixture
def seen() -> Iterator[list[str]]:
    SEEN.clear()
    yield SEEN
    SEEN.clear()


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (3, 1), (1, 2)])
def test_after_an_error_no_rank_begins_another_action(seen: list[str], ranks: int, replicas: int) -> None:
    failing = f"rank {ranks * replicas - 1}"
    job = prepare(
        settings(
            "gpipe",
            ranks,
            8,
            replicas,
            precision="fp32",
            model={
                "_target_": "test_threads.layers",
                "count": ranks,
                "failing": failing,
                "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
            },
            data={"_target_": "test_threads.Rows"},
        ),
        ".",
        ".",
    )
    records: list[Record] = []
    outcome = in_threads(job, records.append)
    assert outcome.status == "failed" and (outcome.error or "").startswith(f"{failing} ")
    assert "ArithmeticError: out of luck" in (outcome.error or "")
    assert seen.count("rank 0") <= 2 and seen.count(failing) == 1  # of eight forwards
