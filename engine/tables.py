"""Small tables of text, for a terminal and in Markdown, and the way figures are printed."""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def table(rows: Rows) -> str:
    """Columns aligned to the right; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def markdown(rows: Rows) -> str:
    """The same as a Markdown table."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + " ---: |" * len(rows[0]), *body])


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def size(nbytes: float) -> str:
    """In the largest decimal unit of which there is one at least."""
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.1f} {unit}"
    return f"{nbytes:.0f} B"


def counted(number: int, noun: str) -> str:
    """1 rank, 2 ranks, 3 micro-batches."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def milliseconds(seconds: float, digits: int = 1) -> str:
    return f"{seconds * 1e3:.{digits}f} ms"
