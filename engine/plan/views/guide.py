"""docs/schedules.md: every schedule described from its own code, drawn and measured.

    python -m engine.plan.views.guide > docs/schedules.md

What a schedule is and where it comes from is the docstring of its file; grids and figures are computed.
"""

from __future__ import annotations

import inspect
import sys
from typing import NamedTuple

from engine.plan.choose import Choice, measured
from engine.plan.features import features
from engine.plan.schedules import SCHEDULES, build, offered_schedules
from engine.plan.simulate import Costs, simulate
from engine.plan.views.grid import grid

RANKS, MICROBATCHES = 4, 8
ANY = "any ranks, any micro-batches"
EVEN_COSTS: dict[str, float] = {"forward": 1, "input_backward": 1, "weight_backward": 1}
UNEVEN_COSTS: dict[str, float] = {"forward": 1, "input_backward": 1.2, "weight_backward": 0.8}


class Advice(NamedTuple):
    """What the code does not say of a schedule: where it is defined, and when to take it."""

    constraints: str
    when: str


ADVICE: dict[str, Advice] = {
    "naive": Advice(ANY, "To see what a pipeline gains, or where memory allows one micro-batch only."),
    "gpipe": Advice(ANY, "The simplest, where the activations of all micro-batches fit, or are recomputed."),
    "1f1b": Advice(ANY, "The default where memory matters: GPipe's time, with P micro-batches in flight at most."),
    "interleaved_1f1b": Advice(
        f"{ANY}; at its best where M is a multiple of P; `schedule.chunks` stages per rank",
        "Few micro-batches per rank and fast links: a smaller bubble for v times the messages and more memory.",
    ),
    "looped_bfs": Advice(
        f"{ANY}; `schedule.chunks` stages per rank",
        "Where weights are sharded over replicas: each stage's weights are needed in one stretch. Keeps everything.",
    ),
    "hanayo": Advice(
        f"{ANY}; at its best where M is a multiple of P; `schedule.waves`, two stages per rank and wave",
        "As interleaving, on links between neighbours only, with 2PW chunks in flight on every rank.",
    ),
    "zb_h1": Advice(ANY, "Instead of 1F1B wherever backwards can be split: less bubble, rank 0's memory on each rank."),
    "zb_h2": Advice(
        f"{ANY}; at its best where M >= 2P-1",
        "Where twice the memory is to spare and steps follow each other without a common moment (no global clipping).",
    ),
    "zb_v": Advice(
        f"{ANY}; at its best where M >= 2P-1",
        "The smallest bubble for 1F1B's memory; F, I and W should take about equally long.",
    ),
    "v_half": Advice(ANY, "Where 1F1B's memory is too much: half of it, and still a smaller bubble than 1F1B's."),
    "v_min": Advice(ANY, "Where memory decides: a third of 1F1B's, the least there is without recomputing."),
    "dualpipe": Advice(
        "P even; M even and at least 2P",
        "Where a forward and a backward can overlap (`model.overlap`), and two copies of the weights fit.",
    ),
    "dualpipe_v": Advice("M at least 2P", "As DualPipe, with one copy of the weights and half of the ranks."),
    "chimera": Advice(
        "P even; M a multiple of P",
        "Few micro-batches, and room for two copies of the weights rather than activations.",
    ),
    "pipedream": Advice(
        f"{ANY} (M is the window drawn here); one micro-batch per update; no clipping by the global norm",
        "Where throughput is all and the model bears stale gradients; memory for P-s versions of stage s's weights.",
    ),
    "pipedream_2bw": Advice(
        "M at least P; no clipping by the global norm",
        "As PipeDream where pipelines are deep: two versions, one update of delay, M micro-batches per update. Behind "
        "a short last batch of an epoch, of fewer than P micro-batches, an update may be two late: a run reports it.",
    ),
}

HEAD = f"""# Schedules

Written by `python -m engine.plan.views.guide > docs/schedules.md`; a test compares it with the code.

Every grid is a simulation with P={RANKS} ranks and M={MICROBATCHES} micro-batches in which F, I and W take one unit
each (a full backward B two, shown as `B0 -`); with v chunks per rank a stage takes 1/v of it. A column is one action
wide, `.` is idle. A rank that holds several stages names them: `5F2` is the forward of micro-batch 2 on stage 5.

* **step**: the largest rank cost, from the start of a rank's first action to the end of its last
* **bubble rate**: how much of it the busiest rank idles. **bubble fraction**: idle time over ranks x makespan; larger
  where ranks begin and end askew
* **uneven**: the step where F, I, W take 1, 1.2, 0.8
* **activations**: the most that any rank keeps, F to W, in micro-batches of a rank's whole slice of the model
* **messages**: between ranks, in one step. **weights**: copies of each stage x versions of its weights, the most on
  any rank. Synchronous schedules keep one version

The asynchronous schedules never drain: a step is M micro-batches in their steady state there, and the bubble that of
this state. Their grids show where a run begins and ends.

`mode=plan plan.compare=all` prints this table for any sizes and costs, within `plan.memory_limit` activations.
"""


def guide() -> str:
    """Return the whole page."""
    names = [name for name in offered_schedules() if name in ADVICE]
    rows = [(_measured(name, EVEN_COSTS), _measured(name, UNEVEN_COSTS)) for name in names]
    rows.sort(key=lambda row: (row[0].cost, row[0].peak))
    table = [
        "| schedule | step | bubble rate | bubble fraction | uneven | activations | messages | weights |",
        "|---|---|---|---|---|---|---|---|",
    ]
    table += [
        f"| [{c.name}](#{c.name}) | {c.cost:g} | {c.bubble_rate:.4f} | {c.bubble_fraction:.4f} | {other.cost:g} | "
        f"{c.peak:g} | {c.transfers} | {c.copies} x {c.versions} |"
        for c, other in rows
    ]
    sections = [_section(c.name) for c, _ in rows]
    return "\n".join([HEAD, *table, "", *sections, _csv()])


def _measured(name: str, costs: dict[str, float]) -> Choice:
    return measured(build(name, RANKS, MICROBATCHES), costs, {})


def _section(name: str) -> str:
    program = build(name, RANKS, MICROBATCHES)
    timeline = simulate(program, Costs.from_settings(EVEN_COSTS, program.placement, MICROBATCHES))
    needs = ", ".join(features(program)) or "nothing beyond forwards and full backwards"
    advice = ADVICE[name]
    return "\n".join(
        [
            f"## {name}\n",
            _description(name) + "\n",
            "```text",
            grid(timeline, width=10_000),
            "```\n",
            f"* Defined for: {advice.constraints}",
            f"* Needs: {needs}",
            f"* When: {advice.when}\n",
        ]
    )


def _csv() -> str:
    return "\n".join(
        [
            "## csv\n",
            _description("csv") + "\n",
            "* Defined for: the ranks and micro-batches of the file `schedule.path`",
            "* When: to run a program of your own, or one that another tool wrote.\n",
        ]
    )


def _description(name: str) -> str:
    """The docstring of the schedule's file."""
    return inspect.cleandoc(sys.modules[SCHEDULES[name].function.__module__].__doc__ or "")


if __name__ == "__main__":
    print(guide(), end="")
