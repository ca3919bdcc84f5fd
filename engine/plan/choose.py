"""Which schedule: several of them side by side for the same pipeline, the cheapest first.

    mode=plan 'plan.compare=[1f1b,zb_v]' plan.memory_limit=4

Memory is given in activations: what one micro-batch leaves on one rank of a pipeline without chunks. A stage that is
one of v chunks of a rank keeps 1/v of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.plan.actions import SENDS, Program, unpack
from engine.plan.lowering import lower
from engine.plan.schedules import SCHEDULES, build, offered_schedules
from engine.plan.simulate import Costs, Figures, figures, simulate
from engine.plan.steady import LongRun, long_run
from engine.plan.verify import peak_kept, verify

ALL = "all"  # among the names: every synchronous schedule that needs no file


@dataclass(frozen=True)
class Choice:
    """One schedule's figures, or why it is out of the question.

    `cost`: the largest rank cost, what a step takes where steps follow each other; `makespan`: of one step alone. Both
    in the unit of the costs, like the bubble figures of `simulate.Figures`. `peak`: the most activations kept on any
    rank, from F to the end of the weight gradient. `transfers`: messages between ranks in a step. `copies`: of weights;
    `versions`: of each copy's weights, the most on any rank. Of an asynchronous schedule a step is M micro-batches in
    the steady state, and both bubble figures are those of that state.
    """

    name: str
    cost: float = 0.0
    makespan: float = 0.0
    bubble_fraction: float = 0.0
    bubble_rate: float = 0.0
    peak: float = 0.0
    transfers: int = 0
    copies: int = 1
    versions: int = 1
    refused: str | None = None


def compare(
    names: Sequence[str],
    ranks: int,
    microbatches: int,
    costs: Mapping[str, Any],
    memory_limit: float | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Choice]:
    """Return the figures of the named schedules, cheapest first.

    Behind them stand those that are not defined there or keep more than the limit. `costs` as `plan.costs`;
    `memory_limit` in activations; `options` of schedules by name. Of two that cost the same the one that keeps less
    comes first, then the one that sends less. Raises ValueError for unknown names, options, costs, and sizes below 1.
    """
    options = options or {}
    wanted = dict.fromkeys(each for name in names for each in (synchronous() if name == ALL else (name,)))
    choices = [_choice(name, ranks, microbatches, costs, memory_limit, options.get(name, {})) for name in wanted]
    return ranked(choices)


def ranked(choices: Iterable[Choice]) -> list[Choice]:
    """Sort choices: the cheapest first, what is out of the question last."""
    return sorted(choices, key=lambda c: (c.refused is not None, round(c.cost, 9), c.peak, c.transfers, c.name))


def synchronous() -> list[str]:
    """Return the synchronous schedules, which `all` stands for: an asynchronous one trains by other updates."""
    infos = {name: SCHEDULES[name] for name in offered_schedules()}
    return [name for name, info in infos.items() if "path" not in info.options and info.stream is None]


def _choice(
    name: str, ranks: int, microbatches: int, costs: Mapping[str, Any], limit: float | None, options: Mapping[str, Any]
) -> Choice:
    if name in SCHEDULES and (complaint := SCHEDULES[name].complaint(ranks, microbatches, options)):
        return Choice(name, refused=complaint)
    program = build(name, ranks, microbatches, options)
    return limited(measured(program, costs, options), limit)


def limited(choice: Choice, limit: float | None) -> Choice:
    """Return the choice, refused where it keeps more activations than `limit`."""
    if limit is None or choice.peak <= limit:
        return choice
    return Choice(choice.name, peak=choice.peak, refused=f"keeps {choice.peak:g} activations, more than {limit:g}")


def measured(program: Program, costs: Mapping[str, Any], options: Mapping[str, Any]) -> Choice:
    """Return the figures of a schedule's program, once it is verified.

    `costs` as `plan.costs`; `options` of the schedule.
    """
    verify(program, ascending=SCHEDULES[program.name].ascending)
    found = figures(program, simulate(program, Costs.from_settings(costs, program.placement, program.microbatches)))
    lowered = lower(program, reduce=False, step=False)
    long = None
    if program.asynchronous:
        long = long_run(program.name, program.ranks, program.microbatches, costs, options)
    return choice_of(program, lowered, found, long)


def choice_of(program: Program, lowered: Program, found: Figures, long: LongRun | None = None) -> Choice:
    """Return the figures of a program that is verified, lowered and simulated already.

    `long` is given where it is asynchronous.
    """
    choice = Choice(
        program.name,
        found.bubble_cost,
        found.makespan,
        found.bubble_fraction,
        found.bubble_rate,
        peak=activations(program),
        transfers=sum(int((unpack(row).op == send).sum()) for row in lowered.rows for send in SENDS),
        copies=program.placement.copies,
    )
    if long is None:
        return choice
    bubble, cost = long.steady.bubble, long.steady.period * program.microbatches
    return replace(choice, cost=cost, bubble_fraction=bubble, bubble_rate=bubble, versions=max(long.versions))


def activations(program: Program) -> float:
    """Return the most that any rank keeps, from F to the end of W, in micro-batches of its whole slice."""
    chunks = max(1, program.stages // program.ranks)
    return max(peak_kept(program)) / chunks


def table(choices: Sequence[Choice]) -> str:
    """Return the comparison for a terminal: one line per schedule."""
    wide = max([len(choice.name) for choice in choices] + [len("schedule")])
    lines = [
        f"{'schedule':<{wide}}  step cost   bubble rate   bubble fraction   activations   transfers   copies   versions"
    ]
    for c in choices:
        if c.refused:
            lines.append(f"{c.name:<{wide}}  -  {c.refused}")
        else:
            lines.append(
                f"{c.name:<{wide}}  {c.cost:>9.6g}   {c.bubble_rate:>11.4f}   {c.bubble_fraction:>15.4f}"
                f"   {c.peak:>11.4g}   {c.transfers:>9}   {c.copies:>6}   {c.versions:>8}"
            )
    return "\n".join(lines)
