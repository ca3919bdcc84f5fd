"""How a run ended, and which of several failures came first, in words: the one error that a failed run reports.

One rank's failure makes the others fail too, a moment later and with less to say. In this order the first that exists
is the cause: an exception a rank raised itself (the earliest by rank 0's clock, as far as the others' was compared with
it); the end of the fork server; a process that ended without a word; a rank that others waited for in vain and that
reported nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.ranks import Rank
from engine.telemetry.position import Place

Meta = Mapping[str, Any]
# What a process cannot say of itself any more. Nobody else sends SIGKILL as often.
OUT_OF_MEMORY = (
    "the system's signal where memory runs out: smaller micro-batches, more ranks or fewer loader processes need less"
)


STOPPED = 75  # exit code of a run that ended as it was asked to, saved: "try again later" (sysexits.h)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `status`: completed, failed or interrupted; `error` names the rank at fault, if one is.
    """

    status: str
    error: str | None = None
    exit_code: int = 0
    traceback: str | None = None


@dataclass
class FailureReport:
    """The failures of world ranks 0..world-1, and which of them is the cause; `ranks` is P."""

    ranks: int
    world: int
    errors: list[Meta] = field(default_factory=list)  # metas of `error` records
    deaths: dict[int, int | None] = field(
        default_factory=dict
    )  # rank -> exit code as multiprocessing gives it, if known
    positions: dict[int, Place] = field(default_factory=dict)  # rank -> what it was last seen doing
    helper: str | None = None  # how a process ended that is no rank, and without which none can go on
    stopped: int | None = None  # after so many steps the ranks have ended because they were asked to
    offsets: dict[int, int] = field(default_factory=dict)  # rank with another clock -> ns to rank 0's

    def add_clock(self, meta: Meta) -> None:
        """Take a `clock` record: the last comparison counts."""
        self.offsets[meta["rank"]] = meta["offset_ns"]

    def add_error(self, meta: Meta) -> None:
        """Take the meta data of an `error` record."""
        self.errors.append(meta)

    def add_death(self, rank: int, exit_code: int | None, position: Place | None = None) -> None:
        """Note that a process ended that had reported neither its end nor an error."""
        self.deaths[rank] = exit_code
        if position is not None:
            self.positions[rank] = position

    @property
    def failed(self) -> bool:
        """Whether anything has failed so far."""
        return bool(self.errors or self.deaths or self.helper)

    @property
    def certain(self) -> bool:
        """Whether the cause is known, not only its effects on other ranks."""
        return bool(self.deaths or self.helper) or any(meta["own"] for meta in self.errors)

    @property
    def cause(self) -> Meta | None:
        """Error record that is the cause, where a record is."""
        own = [meta for meta in self.errors if meta["own"]]
        return min(own, key=self._when) if own else None

    @property
    def traceback(self) -> str | None:
        """Traceback of the reported error, where there is one."""
        meta = self.cause or (self.errors[0] if self.errors and not (self.deaths or self.helper) else None)
        return meta["traceback"] if meta else None

    def outcome(self, signum: int | None) -> Outcome:
        """Return how the run ended, `signum` being the signal that interrupted it, if one did.

        A failure outweighs a signal: a launcher that ends the survivors of a failure does it with a signal.
        """
        if self.failed:
            return Outcome("failed", self.message(), 1, self.traceback)
        if self.stopped is not None:
            told = f"ended after {self.stopped} steps as it was asked to; resume=FOLDER goes on from the checkpoint"
            return Outcome("interrupted", told, STOPPED)
        if signum is not None:
            return Outcome("interrupted", f"interrupted by {signal.Signals(signum).name}", 128 + signum)
        return Outcome("completed")

    def message(self) -> str:
        """Return one sentence that begins with who failed; only for a failed run."""
        assert self.failed
        meta = self.cause
        if meta is not None:
            return f"{self._who(meta['rank'], _place(meta))} failed: {meta['type']}: {meta['message']}"
        if self.helper is not None:
            return self.helper
        if self.deaths:
            rank, code = next(iter(self.deaths.items()))
            hint = f" ({OUT_OF_MEMORY})" if code == -signal.SIGKILL else ""
            return f"{self._who(rank, self._last_seen(rank))} {ended(code)}{hint}"
        return self._silent()

    def _silent(self) -> str:
        first = min(self.errors, key=self._when)
        seen = f"{self._who(first['rank'], _place(first))} saw: {first['message']}"
        reported = {meta["rank"] for meta in self.errors}
        waited_for = [m["peer"] for m in self.errors if m["peer"] is not None and m["peer"] not in reported]
        silent = sorted(set(waited_for)) or sorted(set(range(self.world)) - reported)
        if not silent:
            return seen
        names = ", ".join(self._who(rank, self._last_seen(rank)) for rank in silent)
        return f"{names} went silent; {seen}"

    def _when(self, meta: Meta) -> int:
        """The moment of an error, on rank 0's clock."""
        return int(meta["time_ns"]) + self.offsets.get(meta["rank"], 0)

    def _last_seen(self, rank: int) -> list[str]:
        return _place(self.positions.get(rank, Place())._asdict())

    def _who(self, rank: int, place: list[str]) -> str:
        if self.world > self.ranks:
            at = Rank.of(rank, self.ranks)
            place = [f"replica {at.replica}", f"pipeline rank {at.pipeline}", *place]
        return f"rank {rank} ({', '.join(place)})" if place else f"rank {rank}"


def _place(meta: Meta) -> list[str]:
    place = []
    if meta.get("stage") is not None:
        place.append(f"stage {meta['stage']}")
    if meta.get("microbatch") is not None and meta["microbatch"] >= 0:
        place.append(f"micro-batch {meta['microbatch']}")
    if meta.get("action"):
        place.append(f"in {meta['action']}")
    return place


def ended(exit_code: int | None) -> str:
    """Describe how a process ended, by its exit code as multiprocessing gives it; None where that is not known."""
    if exit_code is None:
        return "went away without a word: its process was killed, or crashed"
    if exit_code >= 0:
        return f"ended with exit status {exit_code} before the run was over"
    if exit_code == -signal.SIGBUS:
        return (
            "was killed by SIGBUS: memory that processes share could not be had (/dev/shm is full, or the memory "
            "limit is reached); make room, or use transport=gloo and data.workers=0"
        )
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
