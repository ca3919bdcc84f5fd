"""The measured timeline in a document of a step (account/steps.py), for what else can be made of it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.folder import schemas
from engine.plan.timeline import Kind, Timeline


class MeasuredStep(NamedTuple):
    """The measured part of a document; times count from its origin.

    `ranks` is P; `uncertainty`: nanoseconds of each rank's clock.
    """

    timeline: Timeline
    ranks: int
    uncertainty: list[int]


def measured(document: str) -> MeasuredStep:
    """Read the measured part of a document. Raises ValueError where it holds nothing of the kind."""
    try:
        content = json.loads(document)
        schemas.check(content, schemas.Document, "the document")
        spans = content["spans"]
        narrow = [np.array(spans[name], dtype=np.int32) for name in ("rank", "kind", "stage", "microbatch")]
        start, length = (np.array(spans[name], dtype=np.int64) for name in ("start", "length"))
        windows, pairs = (np.array(content[name], dtype=np.int64).reshape(-1, 2) for name in ("windows", "pairs"))
        ranks, uncertainty = int(content["ranks"]), [int(ns) for ns in content["uncertainty"]]
    except (KeyError, TypeError, OverflowError, IndexError, RecursionError) as error:
        raise ValueError(f"not a document of a step: {error!r:.200}") from error
    shapes = {column.shape for column in narrow} | {start.shape, length.shape}
    indices = _index(narrow[0], len(windows)) and _index(pairs, start.size)
    indices = indices and bool(np.isin(narrow[1], list(Kind)).all())
    if shapes != {(start.size,)} or not indices or ranks < 1 or len(uncertainty) != len(windows):
        raise ValueError("not a document of a step: its columns do not belong together")
    timeline = Timeline(narrow[0], narrow[1], narrow[2], narrow[3], start, start + length, windows, pairs)
    return MeasuredStep(timeline, ranks, uncertainty)


def _index(numbers: npt.NDArray[np.integer[Any]], size: int) -> bool:
    return bool(((numbers >= 0) & (numbers < size)).all())
