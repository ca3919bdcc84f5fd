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
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from engine.runtime.stage import Stage
from engine.runtime.transport import AnyMemory, Channel, Edge, Transport, Work
from engine.settings import Delay


class SlowDataset(Dataset[Any]):
    """A map-style data set whose samples take `seconds` longer."""

    def __init__(self, data: Any, seconds: float) -> None:
        self._data, self._seconds = data, seconds

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return self._data[index]


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
    slow = {(int(source), int(target)): ms * 1e-3 for source, target, ms in delay.links}
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
