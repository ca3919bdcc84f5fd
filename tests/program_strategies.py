"""Programs for tests of the pure plan: the schedules' own, and random ones that are valid by construction."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from engine.plan.actions import Action, Op, Placement, Program
from engine.plan.schedules import SCHEDULES, build, offered_schedules

PLAIN = ("naive", "gpipe", "1f1b")  # one stage per rank, full backwards
EVERY = tuple(name for name in offered_schedules() if name != "csv" and SCHEDULES[name].stream is None)
ASYNCHRONOUS = tuple(name for name in offered_schedules() if SCHEDULES[name].stream is not None)


@st.composite
def scheduled(draw: st.DrawFn, names: Sequence[str] = EVERY, most: int = 5) -> Program:
    """A schedule's program, with the fewest micro-batches from a drawn number on for which it is defined."""
    name = draw(st.sampled_from(names))
    ranks, microbatches = draw(st.integers(1, most)), draw(st.integers(1, most + 2))
    if SCHEDULES[name].complaint(ranks, 12 * ranks, {}):
        ranks += 1  # it wants an even number
    while SCHEDULES[name].complaint(ranks, microbatches, {}):
        microbatches += 1
    return build(name, ranks, microbatches)


@st.composite
def executed(draw: st.DrawFn) -> Program:
    """Written down from a random execution: any placement, full and split backwards, one direction or two."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    ranks, stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    way = tuple(rng.randrange(ranks) for _ in range(stages))
    placement = Placement(ranks, (way,))
    if rng.random() < 0.3:
        placement = Placement(ranks, (way, way[::-1]), tuple(m % 2 for m in range(microbatches)))
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    split = {(s, m): rng.random() < 0.5 for s in range(stages) for m in range(microbatches)}
    done: set[tuple[int, Op, int]] = set()
    waiting = _needed(stages, microbatches, split)
    while waiting:
        ready = [a for a, needs in waiting.items() if needs <= done and _in_turn(a, waiting, placement)]
        action = rng.choice(ready)
        del waiting[action]
        done.add(action)
        rows[placement.rank(action[0], action[2])].append(Action(*action))
    return Program.of("executed", placement, microbatches, rows)


def _needed(
    stages: int, microbatches: int, split: dict[tuple[int, int], bool]
) -> dict[tuple[int, Op, int], set[tuple[int, Op, int]]]:
    needs: dict[tuple[int, Op, int], set[tuple[int, Op, int]]] = {}
    for s in range(stages):
        for m in range(microbatches):
            needs[s, Op.F, m] = {(s - 1, Op.F, m)} if s else set()
            after = {(s + 1, Op.I if split[s + 1, m] else Op.B, m)} if s + 1 < stages else set()
            needs[s, Op.I if split[s, m] else Op.B, m] = {(s, Op.F, m)} | after
            if split[s, m]:
                needs[s, Op.W, m] = {(s, Op.I, m)}
    return needs


def _in_turn(action: tuple[int, Op, int], waiting: dict, placement: Placement) -> bool:
    """A stage's gradients are added in ascending order on each rank that has it."""
    stage, op, m = action
    groups = [g for g in ((Op.B, Op.I), (Op.B, Op.W)) if op in g]
    return not any(
        (stage, other, k) in waiting and placement.rank(stage, k) == placement.rank(stage, m)
        for group in groups
        for other in group
        for k in range(m)
    )
