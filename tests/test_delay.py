"""What is made slow on purpose is late, in order, and nothing else; and the run's own report finds it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Engine, engine
from workers import RUNS, Run

from engine.runtime.delay import SlowDataset, slowed
from engine.runtime.transport import Edge, Transport
from engine.runtime.transport.threads import ThreadHub
from engine.settings import Delay

__all__ = ["engine"]


def test_a_slow_link_is_late_and_keeps_its_order() -> None:
    hub, edge, back = ThreadHub(2, 20), Edge(0, 1, "F"), Edge(1, 0, "B")
    ends = [slowed(hub.transport(rank), Delay(links=[[0, 1, 500]])) for rank in range(2)]
    for end in ends:
        end.open([edge, back])
    begun = time.monotonic()
    sends = [ends[0].channel(edge).isend(torch.tensor([float(k)])) for k in range(3)]
    assert not sends[0].done()
    buffers = [torch.zeros(1) for _ in range(3)]
    for receive in [ends[1].channel(edge).irecv(buffer) for buffer in buffers]:
        receive.wait()
    assert time.monotonic() - begun >= 0.5
    assert [float(buffer) for buffer in buffers] == [0, 1, 2]
    for send in sends:
        send.wait()
    assert ends[0].channel(edge).bytes_sent == 12
    assert ends[0].channel(edge) is ends[0].channel(edge)
    assert type(ends[1].channel(back)).__name__ == "_ThreadChannel"
    ends[0].close()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_slow_link_may_be_waited_for_while_it_sends(run: Run) -> None:
    """A thread sends what is late while the rank's own waits for what is sent, and asks for memory to fill."""

    def main(transport: Transport) -> list[float]:
        edge, count = Edge(0, 1, "F"), 500
        end = slowed(transport, Delay(links=[[0, 1, 0.05]]))
        end.open([edge])
        channel = end.channel(edge)
        if transport.rank == 1:
            found = torch.zeros(count)
            for k in range(count):
                channel.irecv(found[k : k + 1]).wait()
            return found.tolist()
        sends = []
        for k in range(count):
            value = channel.empty(4, transport.device).view(torch.float32) if k % 2 else torch.empty(1)
            sends.append(channel.isend(value.fill_(k)))
            if k >= 3:
                sends[k - 3].done()
                sends[k - 3].wait()
        for send in sends:
            send.wait()
        end._end()
        return [float(k) for k in range(count)]

    sent, received = run(2, main)
    assert received == sent


def test_without_delays_nothing_stands_in_between() -> None:
    transport = ThreadHub(2, 20).transport(0)
    assert slowed(transport, Delay()) is transport


def test_a_slow_data_set_has_the_same_samples() -> None:
    data = SlowDataset([(1, 2), (3, 4)], 0.02)
    begun = time.monotonic()
    assert (len(data), data[1]) == (2, (3, 4)) and time.monotonic() - begun >= 0.02


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("delay.ranks=[[7,5]]", "ranks 0..1"),
        ("delay.ranks=[3]", "not a list of lists"),
        ("delay.links=[[0,1]]", "[from rank,to rank,ms]"),
        ("delay.links=[[0,1,-4]]", "nothing negative"),
        ("delay.sample_ms=-1", "at least 0"),
    ],
)
def test_wrong_delays_are_refused(engine: Engine, key: str, said: str) -> None:
    ended = engine("model=sleep", "data=synthetic", key)
    assert ended.code != 0 and said in ended.err


CASES: dict[str, tuple[tuple[str, ...], str, float]] = {
    # what is made slow, the bar that grows, milliseconds
    "a micro-batch": (("delay.ranks=[[1,60,2]]",), "variation", 60.0),
    "a link": (("delay.links=[[0,1,60]]",), "transfer", 60.0),
}


def bars(engine: Engine, *keys: str) -> dict[str, Any]:
    ended = engine(
        "model=sleep", "data=synthetic", "data.shape=[16]", "train.steps=4", "train.global_batch_size=8",
        "launch=threads", "eval.every=0", "device=cpu", *keys,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    latest = max(ended.folder.glob("runs/**/summary.json"), key=lambda path: path.stat().st_mtime)
    found: dict[str, Any] = json.loads(latest.read_text())["waterfall"]
    return found


def test_the_report_finds_what_was_made_slow(engine: Engine, tmp_path: Path) -> None:
    """Only that it is found: on a machine that does other work other bars may grow too. How exactly, test_waterfall.py
    says in virtual time, and `scripts/bench waterfall` measures."""
    for what, (keys, bar, ms) in CASES.items():
        assert bars(engine, *keys)[bar] > 0.5e-3 * ms, what
