"""Text tables for a terminal and in Markdown, and the formats of figures."""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def table(rows: Rows) -> str:
    """Return a table with columns aligned to the right; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def markdown(rows: Rows) -> str:
    """Return a Markdown table; the first row is the head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + " ---: |" * len(rows[0]), *body])


def percent(fraction: float | None) -> str:
    """Format a fraction as percent with one digit, 0.25 as "25.0 %"; None as "-"."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def size(nbytes: float) -> str:
    """Format bytes with the largest SI unit that gives a value of at least 1, such as "1.5 MB"."""
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.1f} {unit}"
    return f"{nbytes:.0f} B"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the right form: "1 rank", "3 micro-batches"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def milliseconds(seconds: float, digits: int = 1) -> str:
    """Format seconds as milliseconds, 0.0123 as "12.3 ms"."""
    return f"{seconds * 1e3:.{digits}f} ms"
