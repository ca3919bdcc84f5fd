"""Colours and words of what stands on a timeline, for the picture and for the tab in TensorBoard; colours of pages.

On a timeline they are Okabe and Ito's ("Color Universal Design", 2008), which stay apart for colour-blind readers;
olive is Paul Tol's.
"""

from __future__ import annotations

from typing import Any

from engine.categories import BY_NAME, Colour, as_data
from engine.plan.timeline import Kind

INK, QUIET, PAPER = "#1e1e1e", "#6e6e6e", "#ffffff"
COLOURS: dict[Kind, Colour] = {
    Kind.F: BY_NAME["compute"].colour,  # sky blue
    Kind.B: "#e69f00",  # orange
    Kind.I: "#e69f00",
    Kind.W: "#009e73",  # bluish green
    Kind.STEP: BY_NAME["optimizer"].colour,  # reddish purple
    Kind.WAIT_DATA: BY_NAME["data"].colour,  # yellow
    Kind.REDUCE: BY_NAME["reduce"].colour,  # vermillion
    Kind.GATHER: "#999933",  # olive
}
WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input-gradient half",
    Kind.W: "weight-gradient half",
    Kind.STEP: "optimizer step",
    Kind.WAIT_DATA: "waiting for data",
    Kind.REDUCE: "reduction (behind)",
    Kind.GATHER: "gathering (behind)",
}

# One after another, for what has no colour of its own. Yellow is too faint for lines on paper.
SERIES: tuple[Colour, ...] = (
    "#0072b2",  # blue
    "#d55e00",  # vermillion
    "#009e73",  # bluish green
    "#cc79a7",  # reddish purple
    "#e69f00",  # orange
    "#56b4e9",  # sky blue
    "#786c60",  # a grey that is warm
)


# What a page is made of, by theme: the names of CSS custom properties, and of what is drawn on a canvas.
THEMES: dict[str, dict[str, Colour]] = {
    "light": {
        "paper": PAPER,
        "card": "#f6f7f8",
        "line": "#dfe2e6",
        "ink": "#1e2226",
        "quiet": "#69707a",
        "accent": "#b3006b",
    },
    "dark": {
        "paper": "#22262b",
        "card": "#2a2f35",
        "line": "#3c434b",
        "ink": "#eceff2",
        "quiet": "#9aa3ad",
        "accent": "#ff7ac4",
    },
}


def style(theme: str, selector: str = ":root") -> str:
    """A theme's colours as a rule of CSS: `var(--ink)` and its siblings, and what the browser itself draws."""
    colours = "".join(f"--{name}:{colour};" for name, colour in THEMES[theme].items())
    return f"{selector}{{{colours}color-scheme:{theme}}}\n"


def for_page() -> dict[str, Any]:
    """What a page needs to draw a timeline: the categories, colours and words of kinds of action, and themes."""
    return as_data() | {
        "kinds": {kind.name: colour for kind, colour in COLOURS.items()},
        "themes": THEMES,
        "words": {kind.name: word for kind, word in WORDS.items()},
    }
