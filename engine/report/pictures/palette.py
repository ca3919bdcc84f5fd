"""Colours and words of what stands on a timeline, for the picture and for the tab in TensorBoard; colours of pages.

On a timeline they are Okabe and Ito's ("Color Universal Design", 2008), which stay apart for colour-blind readers;
olive is Paul Tol's.
"""

from __future__ import annotations

from typing import Any

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


# What a page is made of, by theme: the names of CSS custom properties, and of what is drawn on a canvas.
THEMES: dict[str, dict[str, Colour]] = {
    "light": {
        "paper": PAPER,
        "card": (246, 247, 248),
        "line": (223, 226, 230),
        "ink": (30, 34, 38),
        "quiet": (105, 112, 122),
        "accent": (179, 0, 107),
    },
    "dark": {
        "paper": (34, 38, 43),
        "card": (42, 47, 53),
        "line": (60, 67, 75),
        "ink": (236, 239, 242),
        "quiet": (154, 163, 173),
        "accent": (255, 122, 196),
    },
}


def style(theme: str, selector: str = ":root") -> str:
    """A theme's colours as a rule of CSS: `var(--ink)` and its siblings, and what the browser itself draws."""
    colours = "".join(f"--{name}:{hexadecimal(colour)};" for name, colour in THEMES[theme].items())
    return f"{selector}{{{colours}color-scheme:{theme}}}\n"


def hexadecimal(colour: Colour) -> str:
    """As a page writes it."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def by_name() -> dict[str, dict[str, Any]]:
    """For a page: colours by kind of action, by name of the account and by theme, and what kinds are called."""
    return {
        "kinds": {kind.name: hexadecimal(colour) for kind, colour in COLOURS.items()},
        "names": {name: hexadecimal(colour) for name, colour in NAME_COLOURS.items()},
        "themes": {
            theme: {name: hexadecimal(colour) for name, colour in colours.items()} for theme, colours in THEMES.items()
        },
        "words": {kind.name: word for kind, word in WORDS.items()},
    }
