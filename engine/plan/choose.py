"""Which schedule: several of them side by side for the same pipeline, the cheapest first.

Memory is given in activations: what one micro-batch leaves on one rank of a pipeline without chunks. A stage that is
one of v chunks of a rank keeps 1/v of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.plan.actions import SENDS, Program, unpack
from engine.plan.lowering import lower
from engine.plan.schedules import SCHEDULES, build
from engine.plan.simulate import Costs, figures, simulate
from engine.plan.verify import peak_kept, verify


@dataclass(frozen=True)
class Choice:
    """One schedule's figures, or why it is out of the question.

    `cost`: the largest rank cost, what a step takes where steps follow each other; `makespan`: of one step alone. Both
    in the unit of the costs, like the bubble figures of `simulate.Figures`. `peak`: the most activations kept on any
    rank, from F to the end of the weight gradient. `transfers`: messages between ranks in a step. `copies`: of weights.
    """

    name: str
    cost: float = 0.0
    makespan: float = 0.0
    bubble_fraction: float = 0.0
    bubble_rate: float = 0.0
    peak: float = 0.0
    transfers: int = 0
    copies: int = 1
    refused: str | None = None


def compare(
    names: Sequence[str],
    ranks: int,
    microbatches: int,
    costs: Mapping[str, Any],
    memory_limit: float | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Choice]:
    """The named schedules, cheapest first; behind them those that are not defined there or keep more than the limit.

    `costs` as `plan.costs`; `memory_limit` in activations; `options` of schedules by name. Of two that cost the same
    the one that keeps less comes first, then the one that sends less. Raises ValueError for unknown names, options,
    costs, and sizes below 1.
    """
    options = options or {}
    choices = [_choice(name, ranks, microbatches, costs, memory_limit, options.get(name, {})) for name in names]
    return sorted(choices, key=lambda c: (c.refused is not None, round(c.cost, 9), c.peak, c.transfers, c.name))


def _choice(
    name: str, ranks: int, microbatches: int, costs: Mapping[str, Any], limit: float | None, options: Mapping[str, Any]
) -> Choice:
    if name in SCHEDULES and (complaint := SCHEDULES[name].complaint(ranks, microbatches, options)):
        return Choice(name, refused=complaint)
    program = build(name, ranks, microbatches, options)
    choice = measured(program, Costs.from_settings(costs, program.placement, microbatches))
    if limit is not None and choice.peak > limit:
        return Choice(name, peak=choice.peak, refused=f"keeps {choice.peak:g} activations, more than {limit:g}")
    return choice


def measured(program: Program, costs: Costs) -> Choice:
    """The figures of a compute-only program, once it is verified."""
    verify(program, ascending=SCHEDULES[program.name].ascending)
    found = figures(program, simulate(program, costs))
    lowered = lower(program, reduce=False, step=False)
    chunks = max(1, program.stages // program.ranks)
    return Choice(
        program.name,
        found.bubble_cost,
        found.makespan,
        found.bubble_fraction,
        found.bubble_rate,
        peak=max(peak_kept(program)) / chunks,
        transfers=sum(int((unpack(row).op == send).sum()) for row in lowered.rows for send in SENDS),
        copies=program.placement.copies,
    )


def table(choices: Sequence[Choice]) -> str:
    """The comparison for a terminal: one line per schedule."""
    wide = max([len(choice.name) for choice in choices] + [len("schedule")])
    lines = [f"{'schedule':<{wide}}  step cost   bubble rate   bubble fraction   activations   transfers   copies"]
    for c in choices:
        if c.refused:
            lines.append(f"{c.name:<{wide}}  -  {c.refused}")
        else:
            lines.append(
                f"{c.name:<{wide}}  {c.cost:>9.6g}   {c.bubble_rate:>11.4f}   {c.bubble_fraction:>15.4f}"
                f"   {c.peak:>11.4g}   {c.transfers:>9}   {c.copies:>6}"
            )
    return "\n".join(lines)
