"""HTML as text in which nothing but our own tags is a tag: all text and all attributes are escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # HTML has no way to write these
_VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Markup | Iterable["Child"] | None


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element. `class_` and `font_size` become class and font-size; an attribute that is None is left out."""
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    start = f"<{name}{''.join(words)}>"
    return Markup(start if name in _VOID else f"{start}{together(children)}</{name}>")


def together(children: Child) -> Markup:
    """Children one after another; strings are text, unless they are markup."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(_escaped(children))
    return Markup("".join(together(child) for child in children))


def plain(text: str) -> str:
    """A text for plotly, which reads some tags and entities in whatever it shows: here none is one."""
    return html.escape(printable(text), quote=False)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def printable(text: str) -> str:
    """The text, with a sign in place of what HTML has no way to write."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text.encode(errors="replace").decode())
