"""What a program asks of whatever executes it, beyond forwards and full backwards of stages that live once."""

from __future__ import annotations

from engine.plan.actions import Op, Program, unpack

SPLIT = "split backward (I and W)"
COPIES = "two copies of each stage"
VERSIONS = "several versions of the weights"


def features(program: Program) -> list[str]:
    """Return those of SPLIT, COPIES and VERSIONS that the program needs."""
    split = any(((op == Op.I) | (op == Op.W)).any() for op in (unpack(row).op for row in program.rows))
    needed = {SPLIT: split, COPIES: program.placement.copies > 1, VERSIONS: program.asynchronous}
    return [feature for feature, there in needed.items() if there]
