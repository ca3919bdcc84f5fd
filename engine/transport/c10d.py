"""What the backends of torch.distributed have in common: a channel is a two-rank process group of its own.

The groups are built directly from the backend's class and a prefix of the store, not through `init_process_group`
and `new_group`: only their members take part, no default group exists, and no 30-minute time limit hides anywhere.

    edge 3 -> 5 "F"     group of [3, 5]: the sender is rank 0 in it, the receiver rank 1; nothing travels back
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from engine.transport import AnyMemory, Channel, Edge, PeerError, PeerLost, PeerTimeout, PlainMemory, Work
from engine.transport.waits import ANYWHERE, Waits
from engine.transports import TransportInfo

T = TypeVar("T")
What = str | tuple[str, int, Edge]  # what was being done, or (send or receive, bytes, edge)
SENDER, RECEIVER = 0, 1
MAX_TAG = 2**31 - 1
ABORT_TAG = 0  # a message of zero bytes is never sent, so no payload has this tag
REDUCIBLE = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.int8, torch.uint8, torch.int32, torch.int64,
})  # fmt: skip


def as_bytes(tensor: Tensor, edge: Edge) -> Tensor:
    """View the memory of a contiguous tensor of any dtype as uint8 [n].

    ValueError where there is no such view.
    """
    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{edge}: a channel carries contiguous tensors; call .contiguous().resolve_conj() first")
    flat = tensor.as_strided((tensor.numel(),), (1,))  # strides of dimensions of size 0 and 1 may be anything
    return flat.view(torch.uint8)


def tag_of(nbytes: int) -> int:
    """Return the tag of a message of `nbytes`, so that it matches only a receive of its own size.

    Without this, gloo lets a short message leave the tail of a buffer unfilled and ends the process on a long one; with
    it, a disagreement ends in PeerTimeout and no half-filled buffer is ever used.
    """
    return nbytes % (MAX_TAG - 1) + 1


def sum_over(members: Sequence[int], label: str) -> str:
    """Name a sum in messages about it."""
    return f"all-reduce {label} over ranks {list(members)}"


def check_reducible(tensor: Tensor, what: str) -> None:
    """Raise ValueError for a dtype that the backends do not add."""
    if tensor.dtype not in REDUCIBLE:
        raise ValueError(f"{what}: the backend does not add {tensor.dtype}; allreduce=ring does")


class C10dTransport(PlainMemory, ABC):
    """A rank's ends. Subclasses say how a process group is made (`_connect`) and torn down (`_break`).

    `device`: where the tensors live. `timeout_s` limits connecting and every wait. `info`: the transport's row.
    """

    info: TransportInfo

    def __init__(
        self, rank: int, world: int, store: Store, timeout_s: float, device: torch.device, waits: Waits = ANYWHERE
    ) -> None:
        self.waits = waits
        self.rank = rank
        self.world = world
        self.device = device
        self.timeout = timedelta(seconds=timeout_s)
        self.aborted = False
        self._store = store
        self._channels: dict[Edge, C10dChannel] = {}
        self._groups: dict[tuple[tuple[int, ...], str], Any] = {}

    @abstractmethod
    def _connect(self, store: Store, rank: int, size: int) -> Any:
        """The backend's process group; blocks until the other members have come."""

    @abstractmethod
    def _break(self, group: Any, rank: int) -> None:
        """Make every wait on a group in which we are `rank` raise, without waiting for anybody."""

    def open(self, edges: Sequence[Edge]) -> None:
        """Connect this rank's ends of `edges`; all ranks call equally often, with the same lists."""
        for edge in edges:
            if self.rank in (edge.src, edge.dst):
                end, peer = (SENDER, edge.dst) if self.rank == edge.src else (RECEIVER, edge.src)
                group = self._meet(f"edge/{edge.src}/{edge.dst}/{edge.label}", end, 2, f"connecting {edge}", peer)
                self._channels[edge] = C10dChannel(self, edge, group, peer)

    def channel(self, edge: Edge) -> Channel:
        """Return this rank's end of an edge that was opened."""
        return self._channels[edge]

    def open_group(self, members: Sequence[int], label: str, backend: bool = False) -> None:
        """Connect the members of later sums."""
        key = tuple(members), label
        name = f"group/{'-'.join(map(str, members))}/{label}"
        what = f"connecting group {label} of ranks {list(members)}"
        self._groups[key] = self._meet(name, members.index(self.rank), len(members), what, None)

    def all_reduce(self, tensor: Tensor, members: Sequence[int], label: str) -> Work:
        """Start a sum over `members`, in place; they must pass equal sizes, or gloo ends the process."""
        what = sum_over(members, label)
        check_reducible(tensor, what)
        if tensor.numel() == 0:
            return Finished()
        group = self._groups[tuple(members), label]
        others = [member for member in members if member != self.rank]
        peer = others[0] if len(others) == 1 else None
        return self.translated(lambda: C10dWork(self, group.allreduce([tensor]), tensor, what, peer), what, peer)

    def check(self) -> None:
        """Do nothing: a process is killed where another rank has failed."""

    def close(self) -> None:
        """Close every channel and group; call it after the last wait."""
        for channel in self._channels.values():
            channel.group = None  # whoever still holds the channel does not keep the connection
        self._channels.clear()
        self._groups.clear()

    def abort(self) -> None:
        """End every wait of this rank with PeerLost, from any thread.

        A rank that is still connecting is released by the time limit only.
        """
        self.aborted = True
        for channel in list(self._channels.values()):
            self._break(channel.group, SENDER if channel.edge.src == self.rank else RECEIVER)
        for (members, _), group in list(self._groups.items()):
            self._break(group, members.index(self.rank))

    def translated(self, call: Callable[[], T], what: str, peer: int | None) -> T:
        """Call the backend and raise its errors as PeerError."""
        try:
            return call()
        except RuntimeError as error:
            raise self.peer_error(error, what, peer) from None

    def _meet(self, name: str, rank: int, size: int, what: str, peer: int | None) -> Any:
        return self.translated(lambda: self._connect(PrefixStore(name, self._store), rank, size), what, peer)

    def peer_error(self, error: RuntimeError, doing: What, peer: int | None) -> PeerError:
        """Translate an error of the backend into a PeerError that names what was done and with whom."""
        what = doing if isinstance(doing, str) else "{} of {} bytes on {}".format(*doing)
        whom = "" if peer is None else f", peer {peer}"
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if self.aborted:
            return PeerLost(f"{what}{whom}: this rank was aborted", peer)
        expired = "timed out" in text.lower() or "timeout" in text.lower()
        if expired and "pair closure" not in text:  # that is the fate of the other waits of a group whose limit expired
            return PeerTimeout(f"{what}{whom}: nothing for {self.timeout.total_seconds():g} s ({text})", peer)
        return PeerLost(f"{what}{whom}: {text}", peer)


class C10dChannel(AnyMemory):
    """One end of an edge. Holds every operation, and so its tensor, until it has been waited for."""

    def __init__(self, transport: C10dTransport, edge: Edge, group: Any, peer: int) -> None:
        self.edge = edge
        self.bytes_sent = 0
        self.group = group
        self._transport = transport
        self._peer = peer
        self._pending: set[C10dWork] = set()

    def isend(self, tensor: Tensor) -> Work:
        """Post a send of a contiguous tensor, which must stay as it is until the work is waited for."""
        work = self._post(tensor, "send", self.group.send, RECEIVER)
        self.bytes_sent += tensor.nbytes
        return work

    def irecv(self, tensor: Tensor) -> Work:
        """Post a receive into a contiguous tensor, which has its message once the work was waited for."""
        return self._post(tensor, "receive", self.group.recv, SENDER)

    def _post(self, tensor: Tensor, kind: str, call: Callable[..., Any], other: int) -> Work:
        data = as_bytes(tensor, self.edge)
        nbytes = data.numel()
        if nbytes == 0:  # both ends know that it is empty
            return Finished()
        what = (kind, nbytes, self.edge)  # put into words only where something goes wrong
        try:
            handle = call([data], other, tag_of(nbytes))
        except RuntimeError as error:
            raise self._transport.peer_error(error, what, self._peer) from None
        waits = self._transport.waits if kind == "receive" else ANYWHERE  # a send is over soon, or was long ago
        work = C10dWork(self._transport, handle, data, what, self._peer, self._pending.discard, waits)
        self._pending.add(work)
        return work


class C10dWork:
    """An operation of the backend; keeps its handle and its tensor."""

    def __init__(
        self,
        transport: C10dTransport,
        handle: Any,
        tensor: Tensor,
        what: What,
        peer: int | None,
        ended: Callable[[C10dWork], None] = lambda work: None,
        waits: Waits = ANYWHERE,
    ) -> None:
        self._transport, self._handle, self._tensor = transport, handle, tensor
        self._what, self._peer, self._ended, self._waits = what, peer, ended, waits

    def done(self) -> bool:
        """Say, without waiting, whether the operation is known to be complete."""
        return self._handle is None or bool(self._transport.info.pollable and self._handle.is_completed())

    def wait(self) -> None:
        """Block until the operation is complete; PeerLost or PeerTimeout where it cannot become so."""
        if self._handle is None:
            return
        try:
            self._waits.keep(self._handle.wait)
        except RuntimeError as error:
            raise self._transport.peer_error(error, self._what, self._peer) from None
        self._ended(self)
        self._handle = None


class Finished:
    """The work of an operation on an empty tensor."""

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""
