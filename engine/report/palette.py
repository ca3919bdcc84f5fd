"""Colours and words of what stands on a timeline, for the picture and for the tab in TensorBoard.

Colours are Okabe and Ito's ("Color Universal Design", 2008), which stay apart for colour-blind readers; olive is
Paul Tol's.
"""

from __future__ import annotations

from engine.plan.timeline import Kind

Colour = tuple[int, int, int]

INK, QUIET, PAPER = (30, 30, 30), (110, 110, 110), (255, 255, 255)
COLOURS: dict[Kind, Colour] = {
    Kind.F: (86, 180, 233),  # sky blue
    Kind.B: (230, 159, 0),  # orange
    Kind.I: (230, 159, 0),
    Kind.W: (0, 158, 115),  # bluish green
    Kind.STEP: (204, 121, 167),  # reddish purple
    Kind.REDUCE: (213, 94, 0),  # vermillion
    Kind.GATHER: (153, 153, 51),  # olive
    Kind.WAIT_DATA: (240, 228, 66),  # yellow
}
WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input-gradient half",
    Kind.W: "weight-gradient half",
    Kind.STEP: "optimizer step",
    Kind.REDUCE: "reduction (behind)",
    Kind.GATHER: "gathering (behind)",
    Kind.WAIT_DATA: "waiting for data",
}
# The names of the account. What is also a kind has that kind's colour; waits for messages are shades apart from them.
NAME_COLOURS: dict[str, Colour] = {
    "compute": COLOURS[Kind.F],
    "fill": (170, 178, 189),
    "stall": (106, 81, 163),
    "transfer": (0, 114, 178),  # blue
    "reduce": COLOURS[Kind.REDUCE],
    "optimizer": COLOURS[Kind.STEP],
    "data": COLOURS[Kind.WAIT_DATA],
    "drain": (205, 209, 214),
    "other": (120, 108, 96),
}
# The bars of the waterfall: those that the account has too look the same there.
BAR_COLOURS: dict[str, Colour] = {
    "work": COLOURS[Kind.F],
    "schedule": NAME_COLOURS["fill"],
    "imbalance": NAME_COLOURS["stall"],
    "variation": COLOURS[Kind.B],
    **{name: NAME_COLOURS[name] for name in ("transfer", "reduce", "optimizer", "data")},
    "rest": NAME_COLOURS["other"],
}


# One after another, for what has no colour of its own. Yellow is too faint for lines on paper.
SERIES: tuple[Colour, ...] = (
    (0, 114, 178),  # blue
    (213, 94, 0),  # vermillion
    (0, 158, 115),  # bluish green
    (204, 121, 167),  # reddish purple
    (230, 159, 0),  # orange
    (86, 180, 233),  # sky blue
    (120, 108, 96),  # a grey that is warm
)


def hexadecimal(colour: Colour) -> str:
    """As a page writes it."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def by_name() -> dict[str, dict[str, str]]:
    """For a page: colours by kind of action and by name of the account, and what kinds are called."""
    return {
        "kinds": {kind.name: hexadecimal(colour) for kind, colour in COLOURS.items()},
        "names": {name: hexadecimal(colour) for name, colour in NAME_COLOURS.items()},
        "words": {kind.name: word for kind, word in WORDS.items()},
    }
