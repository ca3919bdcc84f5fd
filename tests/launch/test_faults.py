"""A member that is lost in the middle of an all-reduce, or that reduces otherwise: an error on all, and no hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from workers import HANG_S, joined, over_gloo, over_shared, processes

from engine.collectives import COLLECTIVES, Group, Hierarchical, all_reduce, peers
from engine.transport import Channel, Edge, PeerError, Transport, Work

SIZE = 37
ODD = [name for name in COLLECTIVES if name != "auto"]


class Lost(Exception):
    """This member is gone."""


class Mortal:
    """A transport that is lost when it is to send for the `after`-th time, or reduce by itself."""

    def __init__(self, transport: Transport, after: int) -> None:
        self._transport, self.left = transport, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def spend(self) -> None:
        if self.left == 0:
            raise Lost
        self.left -= 1

    def channel(self, edge: Edge) -> Channel:
        return _MortalChannel(self, self._transport.channel(edge))

    def all_reduce(self, *arguments: Any) -> Work:
        self.spend()
        return self._transport.all_reduce(*arguments)


class _MortalChannel:
    def __init__(self, owner: Mortal, channel: Channel) -> None:
        self._owner, self._channel = owner, channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def isend(self, tensor: Tensor) -> Work:
        self._owner.spend()
        return self._channel.isend(tensor)


class Ended(NamedTuple):
    """How a member ended: `how` is done, lost or missing (it missed another), and whom it then named."""

    how: str
    peer: int | None = None
    result: list[float] = []  # noqa: RUF012


def ends(run: Any, world: int, name: str, victim: int, after: int) -> list[Ended]:
    started = threading.Barrier(world)

    def main(transport: Transport) -> Ended:
        mortal = Mortal(transport, after if transport.rank == victim else 10**9)
        collective = joined(mortal, COLLECTIVES[name])
        value = torch.full((SIZE,), float(10**transport.rank), dtype=torch.float64)
        started.wait(HANG_S)
        try:
            collective.all_reduce(value)
            return Ended("done", result=value.unique().tolist())
        except Lost:
            return Ended("lost")
        except PeerError as error:
            return Ended("missing", error.peer)
        finally:
            if value.unique().numel() != 1 or value[0] != float("1" * world):
                transport.abort()  # as its process would by ending

    return list(run(world, main))


@pytest.mark.parametrize("run", [over_gloo, over_shared], ids=["gloo", "shared"])
@pytest.mark.parametrize("name", ODD)
@settings(max_examples=6, deadline=None)
@given(world=st.integers(2, 8), seed=st.integers(0, 10**6), after=st.integers(0, 5))
@pytest.mark.slow
def test_a_member_lost_in_the_middle_is_missed_by_all_that_need_it(
    run: Any, name: str, world: int, seed: int, after: int
) -> None:
    """Whoever has all that it needs already may end well, and then with the right sum.

    Of the backend's own only three: it knows more connections than `abort` can close, and a process that ends closes.
    """
    world = min(world, 3) if name == "native" else world
    victim = seed % world
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "PIECE_BYTES", 64)
        began = time.monotonic()
        found = ends(run, world, name, victim, after)
        assert time.monotonic() - began < HANG_S
    for rank, ended in enumerate(found):
        assert (ended.how == "lost") <= (rank == victim)
        assert ended.how != "done" or ended.result == [float("1" * world)]
        assert ended.how != "missing" or ended.peer is None or ended.peer != rank
    if after == 0:
        assert found[victim].how in ("lost", "missing") and "missing" in {ended.how for ended in found}


@pytest.mark.parametrize("run", [over_gloo, over_shared], ids=["gloo", "shared"])
@pytest.mark.parametrize("other", ["halving_doubling", "recursive_doubling", "hierarchical"])
def test_a_member_with_another_algorithm_is_an_error_on_all(other: str, run: Any) -> None:
    def main(transport: Transport) -> str:
        kind = COLLECTIVES[other] if transport.rank == 1 else COLLECTIVES["ring"]
        if other == "hierarchical":
            kind = Hierarchical.grouped(2 if transport.rank == 1 else 4)
        transport.open(Group.edges(range(4), "g"))
        group = Group(transport, range(4), "g", kind)
        with pytest.raises(ValueError, match="g: the members call differently") as error:
            all_reduce(torch.ones(SIZE), group=group)
        return str(error.value)

    (said,) = set(run(4, main))
    assert f"rank(s) 1: all_reduce of [{SIZE}] float32, sum, by {other}" in said


def _reduce_until_it_fails(transport: Transport, pipe: Any) -> None:
    collective = joined(transport, COLLECTIVES["halving_doubling"])
    value = torch.ones(SIZE)
    collective.all_reduce(value)
    pipe.send("met")
    try:
        while True:
            collective.all_reduce(value.fill_(1))
    except PeerError as error:
        pipe.send((type(error).__name__, error.peer))


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_process_ends_the_reduction_of_all_others() -> None:
    with processes(3, _reduce_until_it_fails, timeout_s=30.0) as started:
        for _, pipe in started:
            assert pipe.poll(HANG_S) and pipe.recv() == "met"
        os.kill(started[1][0].pid, signal.SIGKILL)
        for rank in (0, 2):
            pipe = started[rank][1]
            assert pipe.poll(HANG_S)
            kind, peer = pipe.recv()
            assert kind == "PeerLost" and peer in {0, 1, 2} - {rank}
