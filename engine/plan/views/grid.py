"""Programs and timelines as a picture of text: one row per rank, an arrow at the action in question.

rank 0 | F0 F1 .  .  B0 -  B1 -
rank 1 | .  F0 B0 -  F1 B1 -  .
                     ^
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.plan.actions import Action, Program, Row
from engine.plan.timeline import COMPUTE_KINDS, Kind, Timeline

_MAX_ROWS = 32
_JOINS = "&"


def grid(what: Program | Timeline, mark: tuple[int, int] | None = None, width: int = 120) -> str:
    """Draw one row per rank, at most `width` characters wide.

    Of a Timeline: columns are equal slots of time; `.` is idle, `-` continues the action before it.
    An overlapped pair is joined: `0F7&7B3`, or `0F7& 7B3` in a Program.
    Of a Program: columns are positions in the row, as nothing is known of time.
    `mark` = (rank, position in the rank's row) gets an arrow below it.
    """
    return _program_grid(what, mark, width) if isinstance(what, Program) else _timeline_grid(what, mark, width)


def _program_grid(program: Program, mark: tuple[int, int] | None, width: int) -> str:
    ranks = _window(program.ranks, mark[0] if mark else 0, _MAX_ROWS)
    room = width - len(f"rank {program.ranks - 1} | ") - 2 * len("... ")
    shown, more = _positions(program, ranks, mark[1] if mark else 0, room)
    lines = []
    for rank in ranks:
        texts = [_cell(program.rows[rank], position) for position in shown]
        lines.append(["..."] * (shown.start > 0) + texts + ["..."] * more)
    at = mark[1] - shown.start + (shown.start > 0) if mark else None
    return _render(lines, ranks, program.ranks, mark[0] if mark else None, at)


def _positions(program: Program, ranks: range, around: int, room: int) -> tuple[range, bool]:
    """The positions whose columns fit into `room` characters, and whether there are more behind.

    About half of the room is before `around`.
    """
    longest = max((len(row) for row in program.rows), default=0)
    begin, end, used = around, around, 0
    for limit, back in ((room // 2, True), (room, False), (room, True)):
        while 0 <= (position := begin - 1 if back else end) < longest:
            wide = 1 + max(len(_cell(program.rows[rank], position)) for rank in ranks)
            if used + wide > limit:
                break
            used, begin, end = used + wide, begin - back, end + (not back)
    return range(begin, end), end < longest


def _cell(row: Row, position: int) -> str:
    if position >= len(row):
        return ""
    action = Action.unpack(row[position])
    return f"{action}{_JOINS}" if action.fused else str(action)


def _timeline_grid(timeline: Timeline, mark: tuple[int, int] | None, width: int) -> str:
    compute = np.flatnonzero(np.isin(timeline.kind, COMPUTE_KINDS))
    lasts = (timeline.end - timeline.start)[compute]
    if not (lasts > 0).any():
        return "(nothing takes any time)"
    begin, end = float(timeline.windows.min()), float(timeline.windows.max())
    ranks, stages = timeline.rank[compute], timeline.stage[compute]
    single = len(np.unique(ranks)) == len(np.unique(ranks.astype(np.int64) << 32 | stages))
    cell = len(f"{'' if single else stages.max()}F{timeline.microbatch[compute].max()}")
    room = max(1, (width - len(f"rank {timeline.ranks - 1} | ")) // (cell + 1))
    wanted = max(1.0, (end - begin) / float(lasts[lasts > 0].min()))  # more than can be counted, it may be
    slots = min(room, round(min(wanted, room)))
    middles: npt.NDArray[np.float64] = begin + (np.arange(slots) + 0.5) * (end - begin) / slots
    shown = _window(timeline.ranks, mark[0] if mark else 0, _MAX_ROWS)
    lines, at = [], None
    for rank in shown:
        spans = compute[ranks == rank]
        spans = spans[np.argsort(timeline.start[spans], kind="stable")]
        active = _active(timeline, spans, middles)
        lines.append([_slot(timeline, active, k, single, cell) for k in range(slots)])
        if mark and rank == mark[0]:
            at = min(slots - 1, int(np.searchsorted(middles, float(timeline.start[spans[mark[1]]]))))
    picture = _render(lines, shown, timeline.ranks, mark[0] if mark else None, at)
    return picture + f"\n(a column is {(end - begin) / slots:.3g} long)" * (slots < wanted)


def _active(timeline: Timeline, spans: Row, times: npt.NDArray[np.float64]) -> list[int]:
    """Which of a rank's spans (ordered by start) runs at each time, -1 for none."""
    if not len(spans):
        return [-1] * len(times)
    latest = np.searchsorted(timeline.start[spans], times, side="right") - 1
    running = (latest >= 0) & (times < timeline.end[spans[latest]])
    return [int(i) for i in np.where(running, spans[latest], -1)]


def _slot(timeline: Timeline, active: Sequence[int], slot: int, single: bool, cell: int) -> str:
    """What is shown of a time: `cell` characters, and the second of an overlapped pair with the mark that joins it."""
    before, now = active[slot - 1] if slot else -1, active[slot]
    if now < 0 or now == before:
        return ("." if now < 0 else "-").ljust(cell)
    joined = (timeline.pairs == (before, now)).all(axis=1).any()
    return _JOINS * bool(joined) + _label(timeline, now, single).ljust(cell)


def _label(timeline: Timeline, span: int, single: bool) -> str:
    """`F0` where each rank has one stage, else `2F0`."""
    stage = "" if single else timeline.stage[span]
    return f"{stage}{Kind(timeline.kind[span]).name}{timeline.microbatch[span]}"


def _window(size: int, around: int, most: int) -> range:
    begin = min(max(0, around - most // 2), max(0, size - most))
    return range(begin, min(size, begin + most))


def _render(lines: list[list[str]], ranks: range, total: int, mark: int | None, at: int | None) -> str:
    """Align the columns, name the rows, and put an arrow under column `at` of rank `mark`.

    A cell that begins with the mark that joins it to the one before has it in place of the space between them.
    """
    widths = [max(len(cell.removeprefix(_JOINS)) for cell in column) for column in zip(*lines, strict=True)]
    digits = len(str(total - 1))
    out = []
    for rank, line in zip(ranks, lines, strict=True):
        head = f"rank {rank:>{digits}} | "
        spaced = (cell if cell.startswith(_JOINS) else " " + cell for cell in line)
        text = "".join(cell.ljust(width + 1) for cell, width in zip(spaced, widths, strict=True))
        out.append((head + text[1:]).rstrip())
        if rank == mark and at is not None:
            out.append(" " * (len(head) + sum(widths[:at]) + at) + "^")
    if hidden := total - len(ranks):
        out.append(f"... and {hidden} more ranks")
    return "\n".join(out)
