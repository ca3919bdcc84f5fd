"""The ranks that a launcher started find each other: a store that all reach, and who is there.

    rank r   hello/r = a word of its own        rank 0   welcome/<that word> = the word of this attempt
    rank r   <attempt>/here/r                   rank 0   goes on once all are here

Everything that follows is kept under the attempt's word. A launcher's store outlives the ranks that it starts again
(torchrun --max-restarts), with all that the first attempt left in it. The launcher's own number of the attempt would
not do instead: it counts each host's restarts, and hosts that were started again because of another do not agree.

Nobody waits in silence, nor for ever: every `TELL_S` it is said for whom, and after `limit_s` it is an error.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from engine import environment

TELL_S = 10.0
_POLL_S = 0.02
_TRY_S = 5.0  # one attempt to connect, or to be understood
_UNKNOWN_S = 30.0  # a name that nobody knows: it may be made known while hosts start


@dataclass
class Deadline:
    """A limit on waiting for something: it is said from time to time what is waited for.

    Times are in seconds; `begun` and `told` on the clock of time.monotonic.
    """

    limit_s: float
    say: Callable[[str], None]
    poll_s: float = _POLL_S
    begun: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the limit; negative behind it."""
        return self.begun + self.limit_s - time.monotonic()

    def wait(self, what: str, remedy: str) -> None:
        """Pause once; say what is waited for where that is due, and raise ValueError behind the limit."""
        now = time.monotonic()
        if now - self.begun > self.limit_s:
            raise ValueError(f"{what}: waited {self.limit_s:g} s (timeout_s); {remedy}")
        if now - self.told > TELL_S:
            self.told = now
            self.say(f"waiting for {what} ({now - self.begun:.0f} s of at most {self.limit_s:g} s)")
        time.sleep(self.poll_s)


@dataclass(frozen=True)
class Rendezvous:
    """Where this rank meets the others: its number, how many there are, and the store that all reach."""

    rank: int
    world: int
    root: Any
    prefix: str

    def store(self) -> Any:
        """Return a client of the store of its own, whose blocking calls block no other client."""
        return PrefixStore(self.prefix, self.root.clone())


def meet(limit_s: float) -> Rendezvous:
    """Find all other ranks; ValueError, in one line, where that does not come about within `limit_s`."""
    environment.check_launcher()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def say(text: str) -> None:
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)

    deadline = Deadline(limit_s, say)
    try:
        root = _open(rank, deadline)
        prefix = _gather(root, world, deadline) if rank == 0 else _report(root, rank, deadline)
    except DistError as error:
        raise ValueError(f"the store at {_address()} went away: {_first_line(error)}; see what ended rank 0") from error
    return Rendezvous(rank, world, root, prefix)


def _address() -> str:
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# ---- the store -----------------------------------------------------------------------------------------------------


def _open(rank: int, deadline: Deadline) -> Any:
    """A client of the launcher's store, or of rank 0's: rank 0 then keeps it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listener = _listen(host, port)
        near = listener.getsockname()[0]
        near = "localhost" if near in ("::", "0.0.0.0") else near
        fd = listener.detach()
        keep: dict[str, Any] = {
            "is_master": True,
            "wait_for_workers": False,
            "master_listen_fd": fd,
            "multi_tenant": True,
        }
        return TCPStore(near, port, timeout=timedelta(seconds=deadline.limit_s), **keep)
    while True:
        _reach(host, port, deadline)
        try:
            with _quiet():
                store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_TRY_S), wait_for_workers=False)
        except DistError as error:
            what = f"a store at {_address()}: what answers there is none ({_first_line(error)})"
            deadline.wait(what, "give the address and port of rank 0, and a port that nothing else uses")
        else:
            store.set_timeout(timedelta(seconds=max(1.0, deadline.left_s)))
            return store


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the stacks that torch's library writes onto the screen where it cannot connect."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket: where no other host has to reach it, on the one address that is meant."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if environment.one_host() or all(_is_loopback(str(address[0])) for *_, address in found):
            family, *_, address = found[0]
            return socket.create_server(address[:2], family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot listen at {_address()}: {error.strerror or error}; MASTER_ADDR must be an address of rank "
            "0's host, and MASTER_PORT a free port there"
        ) from error


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _reach(host: str, port: int, deadline: Deadline) -> None:
    """Wait until somebody listens there: torch's own client would wait in silence."""
    remedy = "start rank 0 first or at the same time, and see that its host and port can be reached from here"
    while True:
        try:
            socket.create_connection((host, port), timeout=_TRY_S).close()
            return
        except socket.gaierror as error:
            why = error.strerror
            if time.monotonic() - deadline.begun > _UNKNOWN_S:
                raise ValueError(f"MASTER_ADDR={host} is no host that is known here ({why}): correct it") from error
        except OSError as error:
            why = error.strerror or str(error)
        deadline.wait(f"the store of rank 0 at {_address()} ({why})", remedy)


# ---- who is there --------------------------------------------------------------------------------------------------


def _key(*words: object) -> str:
    return "/".join(["engine", environment.run_id(), *map(str, words)])


def _gather(root: Any, world: int, deadline: Deadline) -> str:
    """Rank 0: welcome all others; the prefix of this attempt's keys."""
    attempt = secrets.token_hex(8)
    away = set(range(1, world))
    welcomed: dict[int, bytes] = {}
    while away:
        for rank in sorted(away):
            if root.check([_key("hello", rank)]):
                word = root.get(_key("hello", rank))
                if welcomed.get(rank) != word:  # an earlier attempt's, or this one's
                    root.set(_key("welcome", word.hex()), attempt)
                    welcomed[rank] = word
            if root.check([_key(attempt, "here", rank)]):
                away.discard(rank)
        if away:
            who = ", ".join(map(str, sorted(away)[:8])) + ", ..." * (len(away) > 8)
            start = "start every rank of the run, or set WORLD_SIZE to how many there are"
            deadline.wait(f"rank {who} of WORLD_SIZE={world} to come to {_address()}", start)
    return _key(attempt)


def _report(root: Any, rank: int, deadline: Deadline) -> str:
    """The others: say that one is there, until rank 0 answers."""
    word = secrets.token_bytes(8)
    root.set(_key("hello", rank), word)
    while not root.check([_key("welcome", word.hex())]):
        deadline.wait("rank 0, whose store is there", "see whether rank 0 runs, and what it says")
    attempt = root.get(_key("welcome", word.hex())).decode(errors="replace")
    root.set(_key(attempt, "here", rank), b"")
    return _key(attempt)
