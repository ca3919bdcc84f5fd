"""Conditions that several schedules share, for `requires`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def at_least(option: str, least: int) -> Callable[..., str | None]:
    """Require a whole number of at least `least` for an option; any ranks and micro-batches will do."""

    def requires(ranks: int, microbatches: int, **options: Any) -> str | None:
        value = options.get(option, least)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return None
        return f"schedule.{option}={value!r} is not possible: it must be a whole number, {least} or more"

    return requires


def allowed(microbatches: int, least: int, step: int) -> str:
    """List the allowed numbers of micro-batches nearest to the one that is not: `8, 10, 12, ...`."""
    first = max(least, (microbatches - 1) // step * step)
    return ", ".join(str(first + k * step) for k in range(3)) + ", ..."
