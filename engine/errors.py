"""What user code raises, in words that can always be said and sent.

A message is made by the exception's own `__str__`, which may fail, never end, or give what no file can hold. Whatever
it does, the type and the place of the error must not be lost.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_CHARACTERS = 20_000


class ExhaustedError(OSError):
    """Something of the system's has run out: the message names it, and where it happened says no more."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to end by signal `signum`. A KeyboardInterrupt, so that nothing takes it for an error."""

    def __init__(self, signum: int, message: str | None = None) -> None:
        super().__init__(message or f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


def message_of(error: BaseException) -> str:
    """What the exception says; never empty, and never raises."""
    try:
        text = str(error)
    except BaseException as inner:  # noqa: BLE001  # `__str__` is user code as well
        return f"(no message: its __str__ raised {type(inner).__name__})"
    return printable(text) or "(no message)"


def said(error: BaseException) -> str:
    """`Type: message`."""
    return f"{type(error).__name__}: {message_of(error)}"


def cause(error: BaseException) -> str:
    """What is said of an error that is handed on: a ValueError is a refusal in words, of others the type tells too."""
    return message_of(error) if isinstance(error, ValueError) else said(error)


def a_type(value: object) -> str:
    """The type of a value, with its article: `a list`, `an int`, `None`."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """Text that can be written anywhere: lone surrogates spelt out, and not without end."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - most} characters ...] {text[-most // 2 :]}"


@contextmanager
def refusing(say: Callable[[BaseException], str], *but: type[BaseException]) -> Iterator[None]:
    """Around user code: whatever it raises becomes `ValueError(say(error))`, but for the types `but`.

    That includes SystemExit, and a KeyboardInterrupt that the code raised itself. The one that a signal causes passes.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (Interrupted, *but)):
            raise
        raise ValueError(say(error)) from error
