"""Table of the nine categories of the account, and of the bars of the waterfall: one row each.

Whatever counts, names, draws or explains a category reads its row here: the account (`account/bubble.py`), the sentence
on the largest cause, report.txt, summary.json, TensorBoard's scalars, the pictures, the documents of steps and with
them the tab's JavaScript. A further category is a further row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.plan.timeline import COMPUTE_KINDS, Kind

Colour = str  # as a page writes it: "#56b4e9"


@dataclass(frozen=True)
class Category:
    """One name under which the account counts nanoseconds; the table's order is the order in which they are shown.

    `what`: what a rank spends the time on, and `remedy`: what makes it less, as parts of a sentence. A configuration
    key in the remedy is given a value where a run is known. `kinds`: spans whose time is claimed. `precedence`: a
    moment that several categories claim is counted under the lowest. `bubble`: whether its time is idle time.

    Waits for messages have no kind here: `account/bubble.py` divides them among fill, stall and transfer.
    """

    name: str
    what: str
    remedy: str
    colour: Colour
    precedence: int
    kinds: tuple[Kind, ...] = ()
    bubble: bool = True


@dataclass(frozen=True)
class Bar:
    """One bar of the waterfall, in the order in which they add up.

    `category`: whose time it is, where there is such a category; then it has the same colour and remedy.
    """

    name: str
    what: str
    colour: Colour
    category: str | None = None


# Okabe and Ito's colours ("Color Universal Design", 2008), which colour-blind readers can tell apart, and greys.
CATEGORIES: tuple[Category, ...] = (
    Category("compute", "forwards and backwards", "", "#56b4e9", 10, COMPUTE_KINDS, bubble=False),
    Category("fill", "waiting for the first message of the step", "use more micro-batches", "#aab2bd", 50),
    Category(
        "stall",
        "waiting for a message that its sender had not sent yet",
        "make the stages equal, or use more micro-batches",
        "#6a51a3",
        70,
    ),
    Category(
        "transfer",
        "waiting for a message that was on its way",
        "cut where less data crosses, or use fewer, larger micro-batches",
        "#0072b2",
        80,
    ),
    Category(
        "reduce",
        "waiting for other replicas",
        "reduce less often with train.accumulate, or try another allreduce",
        "#d55e00",
        40,
        (Kind.WAIT_REDUCE, Kind.WAIT_GATHER, Kind.WAIT_COUNT),
    ),
    Category(
        "optimizer",
        "the optimizer",
        "update less often with train.accumulate, or spread the parameters more evenly",
        "#cc79a7",
        20,
        (Kind.STEP,),
    ),
    Category("data", "waiting for data", "load ahead with data.workers", "#f0e442", 30, (Kind.WAIT_DATA,)),
    Category(
        "drain",
        "nothing left to compute until the end of the step",
        "use more micro-batches",
        "#cdd1d6",
        60,
        (Kind.WAIT_NORM,),
    ),
    Category(
        "other",
        "the interpreter between actions",
        "give each action more to do: fewer, larger micro-batches",
        "#786c60",
        90,  # the last: it claims every moment
    ),
)
BY_NAME = {category.name: category for category in CATEGORIES}
NAMES = tuple(BY_NAME)


def _own(name: str, what: str, category: str) -> Bar:
    return Bar(name, what, BY_NAME[category].colour, category)


WATERFALL: tuple[Bar, ...] = (
    Bar("work", "perfect work", BY_NAME["compute"].colour),
    Bar("schedule", "the schedule itself", BY_NAME["fill"].colour),
    Bar("imbalance", "stages are unequal", BY_NAME["stall"].colour),
    Bar("variation", "micro-batches vary", "#e69f00"),
    _own("transfer", "messages under way", "transfer"),
    _own("reduce", "waiting for replicas", "reduce"),
    _own("optimizer", "norms and optimizer", "optimizer"),
    _own("data", "loading", "data"),
    _own("rest", "the rest", "other"),
)


def claims() -> dict[Kind, Category]:
    """The category of each kind of span that has one by itself; of several that claim it the first by precedence."""
    order = sorted(CATEGORIES, key=lambda category: -category.precedence)
    return {kind: category for category in order for kind in category.kinds}


def as_data() -> dict[str, list[dict[str, Any]]]:
    """Both tables as a page reads them: {"categories": [{"name": ...}, ...], "bars": [{"name": ...}, ...]}."""
    categories = [
        {"name": c.name, "what": c.what, "remedy": c.remedy, "colour": c.colour, "bubble": c.bubble}
        | {"kinds": [kind.name for kind in c.kinds]}
        for c in CATEGORIES
    ]
    return {
        "categories": categories,
        "bars": [{"name": b.name, "what": b.what, "colour": b.colour} for b in WATERFALL],
    }


def rows() -> list[list[str]]:
    """A table for documents: what each category is, and what makes it less."""
    return [["name", "time spent on", "what helps"], *([c.name, c.what, c.remedy or "-"] for c in CATEGORIES)]
