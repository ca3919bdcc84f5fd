"""What is made slow on purpose is late, in order, and nothing else; and the run's own report finds it."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Engine, engine
from harness import settings
from workers import RUNS, Run

from engine.cli import run
from engine.prepare.prepare import prepare
from engine.settings import AllReduceSettings, Delay
from engine.training.connections import connections
from engine.training.delay import SlowDataset, check_delay, slowed
from engine.transport import Edge, Transport
from engine.transport.threads import ThreadHub

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


@pytest.mark.parametrize("over", RUNS.values(), ids=RUNS)
def test_a_slow_link_may_be_waited_for_while_it_sends(over: Run) -> None:
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

    sent, received = over(2, main)
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
        ("delay.links=[[1,1,5]]", "delay.links: [1,1,5] delays nothing: no channel leads from rank 1 to rank 1; take"),
        ("delay.ranks=[[0,5,4]]", "delay.ranks: [0,5,4] delays nothing: the micro-batches are 0..3"),
        ("delay.ranks=[[0,5,0.5]]", "[0,5,0.5] delays nothing"),
    ],
)
@pytest.mark.slow(keep=2)
def test_wrong_delays_are_refused(engine: Engine, key: str, said: str) -> None:
    ended = engine("model=sleep", "data=synthetic", "launch=threads", key)
    assert ended.code == run.REFUSED and said in ended.err and ended.err.count("\n") == 1


LAYERS = {"_target_": "toys.mlp", "loss": {"_target_": "toys.TokenLoss"}}
WIRED: dict[str, tuple[dict[str, Any], set[tuple[int, int]]]] = {
    # of a run on P=3 ranks: what else it is, and between which ranks messages go
    "a chain": ({"schedule": "1f1b"}, {(0, 1), (1, 2), (2, 1), (1, 0)}),
    "wrapped around": ({"schedule": "interleaved_1f1b"}, {(0, 1), (1, 2), (2, 0), (0, 2), (2, 1), (1, 0)}),
    "a V": ({"schedule": "zb_v"}, {(0, 1), (1, 2), (2, 1), (1, 0)}),
    "rings": (
        {"schedule": "1f1b", "replicas": 2},
        {
            (0, 1),
            (1, 2),
            (2, 1),
            (1, 0),
            (3, 4),
            (4, 5),
            (5, 4),
            (4, 3),
            (0, 3),
            (3, 0),
            (1, 4),
            (4, 1),
            (2, 5),
            (5, 2),
        },
    ),
    "the backend's reduction": (
        {"schedule": "1f1b", "replicas": 2, "allreduce": AllReduceSettings("native")},
        {(0, 1), (1, 2), (2, 1), (1, 0), (3, 4), (4, 5), (5, 4), (4, 3)},
    ),
    "one direction of a ring": ({"schedule": "gpipe", "ranks": 1, "replicas": 3}, {(0, 1), (1, 2), (2, 0)}),
    "nothing": ({"schedule": "gpipe", "ranks": 1}, set()),
}


@pytest.mark.parametrize("which", WIRED)
@pytest.mark.slow(keep=4)
def test_a_link_is_one_that_carries_messages(which: str) -> None:
    given, links = dict(WIRED[which][0]), WIRED[which][1]
    ranks, replicas = given.pop("ranks", 3), given.pop("replicas", 1)
    wanted = settings(given.pop("schedule"), ranks, 6, replicas, model=LAYERS, global_batch_size=18, **given)
    job = prepare(wanted, ".", ".")
    for pair in itertools.product(range(ranks * replicas), repeat=2):
        asked = replace(job, settings=replace(wanted, delay=Delay(links=[[*map(float, pair), 5.0]])))
        if pair in links:
            check_delay(asked, connections(job).edges)
            continue
        with pytest.raises(ValueError, match="delays nothing: no channel leads") as caught:
            check_delay(asked, connections(job).edges)
        named = named_pairs(str(caught.value))
        assert set(named) <= links and bool(named) == bool(links)


def named_pairs(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"\[(\d),(\d)\]", text)]


def test_of_many_links_those_of_the_same_sender_come_first() -> None:
    wanted = settings("1f1b", 8, 8, model=LAYERS, delay=Delay(links=[[5, 2, 1.5]]))
    with pytest.raises(
        ValueError, match=r"\[5,2,1\.5\] delays nothing.* take one of \[5,4\], \[5,6\], \[0,1\], .* and 2 more"
    ):
        prepare(wanted, ".", ".")


def test_delays_of_one_link_add_up() -> None:
    transport: Any = slowed(ThreadHub(2, 20).transport(0), Delay(links=[[0, 1, 2], [1, 0, 5], [0, 1, 3]]))
    assert transport._slow == {(0, 1): pytest.approx(5e-3), (1, 0): pytest.approx(5e-3)}


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


@pytest.mark.slow
def test_the_report_finds_what_was_made_slow(engine: Engine, tmp_path: Path) -> None:
    """Only that it is found: on a machine that does other work other bars may grow too. How exactly, test_waterfall.py
    says in virtual time, and `scripts/bench waterfall` measures."""
    for what, (keys, bar, ms) in CASES.items():
        assert bars(engine, *keys)[bar] > 0.5e-3 * ms, what
