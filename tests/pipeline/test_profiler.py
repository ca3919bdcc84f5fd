"""Who looks with torch's own profiler sees the actions by name; who does not pays nothing for that."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from harness import settings

from engine.pipeline import executor
from engine.prepare.prepare import prepare
from engine.training.worker import Worker
from engine.transport.threads import ThreadHub


def run() -> None:
    """One rank, in this thread."""
    job = prepare(settings(ranks=1, microbatches=2, steps=1), ".", ".")
    Worker(job, 0, ThreadHub(1, 20).transport(0), lambda data: None).run()


def test_the_profiler_shows_the_actions_by_name() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    names = {event.key for event in profile.key_averages()}
    assert {"0F0", "0F1", "0B0", "0B1", "0STEP"} <= names


def test_without_a_profiler_nothing_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    labelled: list[str] = []

    def label(name: str) -> AbstractContextManager[None]:
        labelled.append(name)
        return nullcontext()

    monkeypatch.setattr(executor, "record_function", label)
    run()
    assert labelled == []
