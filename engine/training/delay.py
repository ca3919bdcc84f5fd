"""Making one thing slow on purpose, to see whether the reports find it: `delay` in the configuration.

    delay.ranks=[[5,20]]         every forward on world rank 5 takes 20 ms longer
    delay.ranks=[[5,20,3]]       only that of micro-batch 3
    delay.links=[[0,1,10]]       every message from world rank 0 to 1 arrives 10 ms later; no rank computes less
    delay.sample_ms=2            every sample takes 2 ms longer to load

A late message is held back by a thread behind its sender, so that sending stays what it is: posted, and not waited for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from engine.job import Job
from engine.pipeline.stage.stage import Stage
from engine.settings import Delay
from engine.transport import AnyMemory, Channel, Edge, Transport, Work

MOST_SHOWN = 12  # pairs of ranks in a message


class SlowDataset(Dataset[Any]):
    """A map-style data set whose samples take `seconds` longer."""

    def __init__(self, data: Any, seconds: float) -> None:
        self._data, self._seconds = data, seconds

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return self._data[index]


def check_delay(job: Job, edges: Iterable[Edge]) -> None:
    """ValueError for what would make nothing slow: a link without messages, a micro-batch that never comes.

    `edges`: all channels of the run.
    """
    programs = [*job.steps.values(), *job.streams.values(), *job.evaluations.values()]
    microbatches = max(program.microbatches for program in programs)
    for row in job.settings.delay.ranks:
        if len(row) == 3 and row[2] not in range(microbatches):
            raise ValueError(f"delay.ranks: {_row(row)} delays nothing: the micro-batches are 0..{microbatches - 1}")
    links = sorted({(edge.src, edge.dst) for edge in edges})
    for row in job.settings.delay.links:
        if (row[0], row[1]) not in links:
            none = f"no channel leads from rank {row[0]:g} to rank {row[1]:g}"
            raise ValueError(f"delay.links: {_row(row)} delays nothing: {none}; {_links(job, links, row[0])}")


def _links(job: Job, links: list[tuple[int, int]], source: float) -> str:
    """Which there are: from `source`, where there are some, before all others."""
    shown = [f"[{a},{b}]" for a, b in sorted(links, key=lambda link: (link[0] != source, link))]
    more = f" and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
    native = job.settings.allreduce.name == "native" and job.reduces
    remark = " (what allreduce=native sends cannot be delayed; another one's messages can)" if native else ""
    if not links:
        return f"there is none at all: leave delay.links out{remark}"
    return f"take one of {', '.join(shown[:MOST_SHOWN])}{more}, or leave it out{remark}"


def _row(row: Sequence[float]) -> str:
    """As it is written."""
    return f"[{','.join(f'{number:g}' for number in row)}]"


def slow_down(stage: Stage, rank: int, delay: Delay) -> None:
    """Let the forwards of a stage of world rank `rank` take as much longer as is asked for."""
    entries = [entry for entry in delay.ranks if entry[0] == rank]
    if not entries:
        return
    forward = stage.forward

    def late(microbatch: int, *arguments: Any, **keywords: Any) -> Any:
        time.sleep(sum(entry[1] for entry in entries if len(entry) < 3 or entry[2] == microbatch) * 1e-3)
        return forward(microbatch, *arguments, **keywords)

    stage.forward = late  # type: ignore[method-assign]


def slowed(transport: Transport, delay: Delay) -> Transport:
    """The transport, with the links that are to be slow made so."""
    slow: dict[tuple[int, int], float] = {}
    for source, target, ms in delay.links:
        slow[int(source), int(target)] = slow.get((int(source), int(target)), 0.0) + ms * 1e-3
    return _SlowTransport(transport, slow) if slow else transport


class _SlowTransport:
    """Passes everything on but for the channels out of this rank that are slow."""

    def __init__(self, transport: Transport, slow: dict[tuple[int, int], float]) -> None:
        self._transport, self._slow = transport, slow
        self._channels: dict[Edge, _SlowChannel] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def channel(self, edge: Edge) -> Channel:
        channel, seconds = self._transport.channel(edge), self._slow.get((edge.src, edge.dst))
        if seconds is None or edge.src != self._transport.rank:
            return channel
        if edge not in self._channels:
            self._channels[edge] = _SlowChannel(channel, seconds)
        return self._channels[edge]

    def close(self) -> None:
        self._end()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
        self._end()

    def _end(self) -> None:
        for channel in self._channels.values():
            channel.end()


class _SlowChannel(AnyMemory):
    """The sending end of a channel: messages leave in their order, each so much after it was posted.

    A channel is made for one thread, and here there are two, the one that sends and the rank's own, which waits. So
    they take turns; and memory is anybody's, so that what waits for a message finds it copied.
    """

    def __init__(self, channel: Channel, seconds: float) -> None:
        self.edge, self.bytes_sent = channel.edge, 0
        self._channel, self._seconds, self._turn = channel, seconds, threading.Lock()
        self._queue: queue.SimpleQueue[_Late | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"late {self.edge}", daemon=True).start()

    def isend(self, tensor: Tensor) -> Work:
        self.bytes_sent += tensor.nbytes
        late = _Late(tensor, time.monotonic() + self._seconds, self._turn)
        self._queue.put(late)
        return late

    def irecv(self, tensor: Tensor) -> Work:
        return self._channel.irecv(tensor)

    def end(self) -> None:
        self._queue.put(None)

    def _serve(self) -> None:
        while (late := self._queue.get()) is not None:
            time.sleep(max(0.0, late.due - time.monotonic()))
            try:
                with self._turn:
                    late.work = self._channel.isend(late.tensor)
            except BaseException as error:  # noqa: BLE001  # raised again by whoever waits
                late.error = error
            late.posted.set()


class _Late:
    """A send that is held back: a Work."""

    def __init__(self, tensor: Tensor, due: float, turn: threading.Lock) -> None:
        self.tensor, self.due, self._turn = tensor, due, turn
        self.posted = threading.Event()
        self.work: Work | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        if self.work is None:
            return False
        with self._turn:
            return self.work.done()

    def wait(self) -> None:
        self.posted.wait()
        if self.error is not None:
            raise self.error
        assert self.work is not None
        with self._turn:
            self.work.wait()
