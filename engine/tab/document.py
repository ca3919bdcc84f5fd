"""The measured timeline in a document of a step (report/steps.py), for what else can be made of it."""

from __future__ import annotations

import json

import numpy as np

from engine.plan.timeline import Timeline


def timeline_of(document: str) -> tuple[Timeline, int]:
    """The timeline, its times counting from the document's origin, and P; ValueError where it holds none."""
    try:
        content = json.loads(document)
        spans = content["spans"]
        narrow = [np.array(spans[name], dtype=np.int32) for name in ("rank", "kind", "stage", "microbatch")]
        times = [np.array(values, dtype=np.int64) for values in (spans["start"], spans["length"], content["windows"])]
        ranks = int(content["ranks"])
    except (KeyError, TypeError, OverflowError, IndexError) as error:
        raise ValueError(f"not a document of a step: {error!r}") from error
    start, length, windows = times
    if len({*map(np.shape, narrow), start.shape, length.shape}) > 1 or start.ndim != 1:
        raise ValueError("not a document of a step: its columns differ in length")
    return Timeline(narrow[0], narrow[1], narrow[2], narrow[3], start, start + length, windows), ranks
