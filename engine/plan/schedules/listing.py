"""Greedy list scheduling: nobody idles who has something to do, and of two things the one nearer to the end goes first.

Every computation of a stage takes one unit of time. A rank that is free takes, of what is ready there, a backward
before any forward, then the deepest stage, then the lowest micro-batch. So what was begun is finished first, and few
micro-batches are in flight.
"""

from __future__ import annotations

from heapq import heappop, heappush

from engine.plan.actions import Action, Op, Placement, Program

_Job = tuple[bool, int, int]  # (is a forward, -stage, micro-batch): the smallest goes first


def listed(name: str, placement: Placement, microbatches: int, backward: bool = True) -> Program:
    """Build F and, with `backward`, B of every (stage, micro-batch), in the order in which they would be begun."""
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    ready: list[list[_Job]] = [[] for _ in range(placement.ranks)]
    for m in range(microbatches):
        heappush(ready[placement.rank(0, m)], (True, 0, m))
    while any(ready):
        running = [heappop(jobs) if jobs else None for jobs in ready]
        for rank, job in enumerate(running):
            if job is None:
                continue
            forward, stage, m = job[0], -job[1], job[2]
            rows[rank].append(Action(stage, Op.F if forward else Op.B, m))
            if (after := _next(forward, stage, placement.stages, backward)) is not None:
                heappush(ready[placement.rank(after[1], m)], (after[0], -after[1], m))
    return Program.of(name, placement, microbatches, rows)


def _next(forward: bool, stage: int, stages: int, backward: bool) -> tuple[bool, int] | None:
    """What a computation makes possible: (is a forward, stage)."""
    if forward and stage + 1 < stages:
        return True, stage + 1
    if forward:
        return (False, stage) if backward else None
    return (False, stage - 1) if stage else None
