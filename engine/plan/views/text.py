"""Programs as text: the `2F0` grammar and the CSV dialect of torch.distributed.pipelining.

A CSV file has one row per rank and one action per cell. An overlapped pair is one cell, `(0F7;7B3)OVERLAP_F_B`,
executed in the order in which it is written. Every cell is matched as a whole: torch reads `2F0&1B3` as `2F0`.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from engine.plan.actions import COMPUTE, NAMES, NO_MICROBATCH, Action, Op, Placement, Program, Row, unpack

_ACTION = re.compile(
    r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|STEP|GATHER|UNSHARD|RESHARD|F|B|I|W)(\d*)", re.ASCII
)
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_SHARDING = ("UNSHARD", "RESHARD")  # torch lists them for FSDP whether or not a stage is sharded; nothing to do here
_ALONE = (Op.REDUCE, Op.GATHER)  # never with a micro-batch; STEP may have one
_OURS = (Op.STEP, Op.GATHER)  # torch knows neither
_MOST_DIGITS = 1000  # zeros in front included
_MAX_STAGE, _MAX_MICROBATCH = 2**23 - 1, 2**32 - 2  # what a packed action holds


def parse_action(text: str) -> Action:
    """Read one action: `2F0`, `1SEND_F3`, `0REDUCE_GRAD`, `0STEP`, `0STEP3`, `0GATHER`.

    Raises ValueError for all else, a pair included.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None or match[2] in _SHARDING:
        raise ValueError(
            f"{_short(text)} is not an action; expected stage, operation, micro-batch as in 2F0 or 1SEND_F3"
        )
    op = Op(NAMES.index(match[2]))
    if bool(match[3]) != (op not in _ALONE) and op is not Op.STEP:
        raise ValueError(f"{_short(text)} is not an action: {match[2]} takes {'no' if match[3] else 'a'} micro-batch")
    if max(len(match[1]), len(match[3])) > _MOST_DIGITS:
        raise ValueError(f"{_short(text)} is out of range: it has {len(text)} characters")
    stage, microbatch = int(match[1]), int(match[3]) if match[3] else NO_MICROBATCH
    if stage > _MAX_STAGE or microbatch > _MAX_MICROBATCH:
        raise ValueError(
            f"{_short(text)} is out of range: stages go to {_MAX_STAGE}, micro-batches to {_MAX_MICROBATCH}"
        )
    return Action(stage, op, microbatch)


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}..."


def parse_cell(text: str) -> tuple[Action, ...]:
    """Read a CSV cell: no action (idle, or torch's UNSHARD and RESHARD), one, or an overlapped pair."""
    text = text.strip()
    if not text or ((match := _ACTION.fullmatch(text)) and match[2] in _SHARDING):
        return ()
    if pair := _PAIR.fullmatch(text):
        first, second = parse_action(pair[1]), parse_action(pair[2])
        if first.op not in COMPUTE or second.op not in COMPUTE:
            raise ValueError(f"{_short(text)} overlaps something that is not a computation (F, B, I, W)")
        return first._replace(fused=True), second
    return (parse_action(text),)


def cells(program: Program, rank: int) -> list[str]:
    """Return a rank's row as CSV cells."""
    return _cells(program.rows[rank])


def _cells(row: Row) -> list[str]:
    fields = unpack(row)
    numbers = zip(fields.op.tolist(), fields.stage.tolist(), fields.microbatch.tolist(), strict=True)
    texts = [f"{stage}{NAMES[op]}{microbatch if microbatch >= 0 else ''}" for op, stage, microbatch in numbers]
    for at in np.flatnonzero(fields.fused)[::-1].tolist():
        texts[at : at + 2] = [f"({';'.join(texts[at : at + 2])})OVERLAP_F_B"]
    return texts


def to_csv(program: Program, for_torch: bool = False) -> str:
    """Write one line per rank.

    `for_torch` leaves out STEP and GATHER, and refuses programs that torch cannot express.
    """
    if for_torch and program.placement.copies > 1:
        raise ValueError(
            f"{program.name} cannot be exported for torch.distributed.pipelining: it keeps {program.placement.copies} "
            "copies of each stage, and there a stage lives on one rank"
        )
    rows = (row[~np.isin(unpack(row).op, _OURS)] if for_torch else row for row in program.rows)
    return "".join(",".join(_cells(row)) + "\n" for row in rows)


def from_csv(text: str, placement: Placement | None = None, name: str = "csv") -> Program:
    """Read a program.

    Without `placement` it is inferred from where the computations stand. Raises ValueError with row and cell for what
    is not an action, and where no placement fits.
    """
    rows: list[list[Action]] = []
    for rank, row in enumerate(_cells_of(text)):
        actions: list[Action] = []
        for column, cell in enumerate(row):
            try:
                actions.extend(parse_cell(cell))
            except ValueError as error:
                raise ValueError(f"row {rank}, cell {column}: {error}") from None
        rows.append(actions)
    compute = [(rank, a) for rank, row in enumerate(rows) for a in row if a.op in COMPUTE]
    if not compute:
        raise ValueError("the program is empty: no row holds a computation (F, B, I, W)")
    microbatches = 1 + max(a.microbatch for _, a in compute)
    placement = placement or _infer(compute, len(rows), microbatches)
    return Program.of(name, placement, microbatches, rows)


def _cells_of(text: str) -> Iterator[list[str]]:
    """The rows of a CSV file; ValueError where it is none."""
    rows = csv.reader(text.splitlines())
    for number in itertools.count():
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(
                f"row {number} is none of a program's, one action per cell as in 0F0,0F1: {error}"
            ) from None


def _infer(compute: Sequence[tuple[int, Action]], ranks: int, microbatches: int) -> Placement:
    """Where each (stage, micro-batch) first appears; one way through the ranks, or two if micro-batches differ."""
    stages = 1 + max(a.stage for _, a in compute)
    if stages * microbatches > 4 * len(compute):
        raise ValueError(
            f"only {len(compute)} computations for {stages} stages x {microbatches} micro-batches: "
            "is a number mistyped?"
        )
    table = np.full((microbatches, stages), -1, dtype=np.int64)
    for rank, a in reversed(compute):
        table[a.microbatch, a.stage] = rank
    for stage in range(stages):
        (seen,) = np.nonzero(table[:, stage] >= 0)
        if not len(seen):
            raise ValueError(f"stage {stage} is on no rank, although there is a stage {stages - 1}")
        table[table[:, stage] < 0, stage] = table[seen[0], stage]
    ways: dict[tuple[int, ...], int] = {}
    direction = tuple(ways.setdefault(tuple(row), len(ways)) for row in table.tolist())
    if len(ways) > 2:
        raise ValueError(f"micro-batches take {len(ways)} different ways through the ranks; a program has one or two")
    return Placement(ranks, tuple(ways), direction if len(ways) > 1 else ())
