"""Any program at all, from a CSV file in the dialect of torch.distributed.pipelining (plan/views/text.py).

The file may list computations alone, or communication too. That must hold together as it stands; it is then left out,
and put in again as for every other schedule. A program of someone else's may add a stage's gradients in another order
than that of the micro-batches, as PyTorch's looped BFS does; its sums then equal those of one process up to rounding
only.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.plan.actions import COMPUTE, Program, unpack
from engine.plan.schedules.registry import schedule
from engine.plan.simulate import compute_only
from engine.plan.verify import verify
from engine.plan.views.text import from_csv


def _requires(ranks: int, microbatches: int, path: Any = None) -> str | None:
    if not isinstance(path, str):
        return f"schedule.path={path!r} must name a CSV file: schedule.path=my_program.csv"
    program = _read(path)
    if (program.ranks, program.microbatches) == (ranks, microbatches):
        return None
    allowed = f"pipeline.ranks={program.ranks} pipeline.microbatches={program.microbatches}"
    return f"{path} holds a program of {program.ranks} ranks and {program.microbatches} micro-batches: use {allowed}"


@schedule("csv", "the program in the CSV file schedule.path", requires=_requires, ascending=False)
def csv(ranks: int, microbatches: int, *, path: str | None = None) -> Program:
    """Build the program in the CSV file `path`.

    One row per rank, one action per cell:

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    assert path is not None
    program = _read(path)
    assert (program.ranks, program.microbatches) == (ranks, microbatches)
    return program


def _read(path: str) -> Program:
    """The computations of the program in the file. Raises ValueError where there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"schedule.path={path} cannot be read: {reason}") from error
    try:
        return _parsed(text)
    except ValueError as error:
        raise ValueError(f"schedule.path={path}: {error}") from error


@lru_cache(maxsize=4)
def _parsed(text: str) -> Program:
    """Asked for again for each number of micro-batches that a short batch might bring."""
    program = from_csv(text)
    for rank, row in enumerate(program.rows):
        if not np.isin(unpack(row).op, COMPUTE).any():
            raise ValueError(f"row {rank} holds no computation: every rank owns a stage; take the row out")
    if program.asynchronous:
        raise ValueError(
            "it lists updates between micro-batches (0STEP3), and a file holds one synchronous step: "
            "take those out, or use schedule=pipedream"
        )
    computations = compute_only(program)
    if sum(map(len, program.rows)) > sum(map(len, computations.rows)):
        verify(program, ascending=False)
    return computations
