"""The registry of schedules: each is one pure function in one file, found here by name.

    @schedule("gpipe", "all forwards, then all backwards")
    def gpipe(ranks, microbatches): ...

The function returns the compute-only program. Its keyword-only parameters are the schedule's options. A schedule that
is not defined for every (ranks, micro-batches) says where through `requires`: a function of the same arguments that
returns None, or the sentence that tells the user what would be allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.plan.actions import Program

Requires = Callable[..., str | None]


@dataclass(frozen=True)
class Stream:
    """What an asynchronous schedule is besides: a program of any length, for all updates between two drains.

    `build(ranks, updates, **options)`: the program for `updates[k]` micro-batches in the k-th update.
    `per_update(microbatches)`: micro-batches of one update in a run that is configured for so many.
    """

    build: Callable[..., Program]
    per_update: Callable[[int], int]


@dataclass(frozen=True)
class ScheduleInfo:
    """A schedule by name. `options` are its option names with their defaults; only `offered` ones are for users.

    `ascending`: whether it promises that each stage adds its gradients in the order of the micro-batches. `stream` is
    given where it is asynchronous.
    """

    name: str
    summary: str
    function: Callable[..., Program]
    options: Mapping[str, Any]
    offered: bool = True
    requires: Requires | None = None
    ascending: bool = True
    stream: Stream | None = None

    def per_update(self, microbatches: int) -> int:
        """Return the micro-batches of one update (and pass) in a run that is configured for so many."""
        return self.stream.per_update(microbatches) if self.stream else microbatches

    def complaint(self, ranks: int, microbatches: int, options: Mapping[str, Any]) -> str | None:
        """Say why the schedule is not defined there; None where it is."""
        return self.requires(ranks, microbatches, **options) if self.requires else None


SCHEDULES: dict[str, ScheduleInfo] = {}


def schedule(
    name: str,
    summary: str,
    *,
    offered: bool = True,
    requires: Requires | None = None,
    ascending: bool = True,
    stream: Stream | None = None,
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Register the decorated function under `name`."""

    def register(function: Callable[..., Program]) -> Callable[..., Program]:
        parameters = inspect.signature(function).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        SCHEDULES[name] = ScheduleInfo(name, summary, function, options, offered, requires, ascending, stream)
        return function

    return register


def offered_schedules() -> list[str]:
    """Return the names that a user may choose, sorted."""
    return sorted(name for name, info in SCHEDULES.items() if info.offered)


def build(name: str, ranks: int, microbatches: int, options: Mapping[str, Any] | None = None) -> Program:
    """Build the compute-only program of schedule `name`.

    Raises ValueError for an unknown schedule or option, for ranks or micro-batches below 1, and where the schedule is
    not defined.
    """
    options = dict(options or {})
    info = _checked(name, ranks, microbatches, options)
    if complaint := info.complaint(ranks, microbatches, options):
        raise ValueError(
            f"schedule {name} is not defined for pipeline.ranks={ranks} pipeline.microbatches={microbatches}: "
            f"{complaint}"
        )
    return info.function(ranks, microbatches, **options)


def largest_legal_microbatches(
    name: str, ranks: int, microbatches: int, options: Mapping[str, Any] | None = None
) -> int | None:
    """Return the largest M <= `microbatches` for which the schedule is defined, or None."""
    options = dict(options or {})
    info = _checked(name, ranks, microbatches, options)
    legal = (m for m in range(microbatches, 0, -1) if info.complaint(ranks, m, options) is None)
    return next(legal, None)


def _checked(name: str, ranks: int, microbatches: int, options: Mapping[str, Any]) -> ScheduleInfo:
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose one of: {', '.join(offered_schedules())}")
    info = SCHEDULES[name]
    if unknown := sorted(set(options) - set(info.options)):
        valid = ", ".join(info.options) or "it has none"
        raise ValueError(f"schedule {name} has no option {', '.join(map(repr, unknown))}; its options: {valid}")
    for key, value in (("pipeline.ranks", ranks), ("pipeline.microbatches", microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key}={value!r} is not possible: it must be a whole number, 1 or more")
    return info
