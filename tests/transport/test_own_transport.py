"""A transport is one file and one row: this file makes one, registers it, and trains over it by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from command import Engine, engine
from harness import settings

from engine.cli import run
from engine.launch import supervise
from engine.prepare.prepare import prepare
from engine.transport import Channel, Edge, Endpoint
from engine.transport.threads import ThreadHub, ThreadTransport
from engine.transports import AUTO, TRANSPORTS, TransportInfo, choose_transport

__all__ = ["engine"]
OPENED: list[tuple[int, Edge]] = []


class Noting(ThreadTransport):
    """Queues between threads that note which channels are used."""

    def channel(self, edge: Edge) -> Channel:
        OPENED.append((self.rank, edge))
        return super().channel(edge)


def make(endpoint: Endpoint) -> Noting:
    hub: ThreadHub = endpoint.meeting
    return Noting(hub, endpoint.rank)


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> TransportInfo:
    info = TransportInfo("noting", "queues that note their channels", f"{__name__}:make", "threads", ("cpu",))
    monkeypatch.setitem(TRANSPORTS, info.name, info)
    OPENED.clear()
    return info


SMALL = ["model=sleep", "data=synthetic", "data.shape=[4]", "train.steps=2", "eval.every=0", "model.forward_ms=0"]
SMALL += ["device=cpu", "launch=threads", "data_parallel.replicas=2", "pipeline.microbatches=2"]


def test_a_run_takes_it_by_name(noting: TransportInfo, engine: Engine) -> None:
    said = engine(*SMALL, "transport=noting")
    assert said.code == 0, said.err
    assert {edge for _, edge in OPENED} >= {Edge(0, 1, "F"), Edge(1, 0, "B"), Edge(2, 3, "F"), Edge(3, 2, "B")}


def test_it_is_offered_and_refused_like_any_other(
    noting: TransportInfo, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "warm_up", lambda: None)
    said = engine(*SMALL, "transport=notting")
    assert said.code == run.REFUSED and "did you mean noting?" in said.err and said.err.count("\n") == 1
    said = engine(*SMALL, "transport=noting", "launch=processes")
    assert said.code == run.REFUSED and said.err.count("\n") == 1
    assert "transport=noting cannot be used with launch=processes" in said.err and not OPENED


@pytest.mark.parametrize(
    ("launch", "device", "taken"),
    [("threads", "cpu", "threads"), ("threads", "cuda", "threads"), ("processes", "cuda", "nccl")],
)
def test_auto_takes_the_first_that_fits(launch: str, device: str, taken: str) -> None:
    assert choose_transport(AUTO, launch, device).name == taken


@pytest.mark.parametrize(
    ("wanted", "launch", "device", "why"),
    [
        ("gloo", "processes", "cuda", "between GPUs; .* takes nccl"),
        ("nccl", "processes", "cpu", "between CPUs"),
        ("threads", "processes", "cpu", "with launch=processes, whose ranks do not share a process"),
        ("gloo", "threads", "cpu", "with launch=threads, whose ranks share one process; .* takes threads"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(wanted: str, launch: str, device: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"transport={wanted} cannot be used {why}"):
        choose_transport(wanted, launch, device)


def test_a_job_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="transport=gloo cannot be used with launch=threads"):
        prepare(replace(settings(), transport="gloo"), ".", ".")
