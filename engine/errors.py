"""Safe formatting of any exception that user code raises.

A message is made by the exception's own `__str__`, which may fail, never end, or give what no file can hold. Whatever
it does, the type and the place of the error must not be lost.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_CHARACTERS = 20_000


class ExhaustedError(OSError):
    """A resource of the system has run out; the message names it, and no traceback is needed."""


class CheckpointError(Exception):
    """A checkpoint could not be made, and `checkpoint.on_failure=stop`."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to end by signal `signum`. A KeyboardInterrupt, so that nothing takes it for an error."""

    def __init__(self, signum: int, message: str | None = None) -> None:
        super().__init__(message or f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells count."""
        return 128 + self.signum


def message_of(error: BaseException) -> str:
    """Return the message of an exception; never empty, and never raises."""
    try:
        text = str(error)
    except BaseException as inner:  # noqa: BLE001  # `__str__` is user code as well
        return f"(no message: its __str__ raised {type(inner).__name__})"
    return printable(text) or "(no message)"


def said(error: BaseException) -> str:
    """Return `Type: message`; never raises."""
    return f"{type(error).__name__}: {message_of(error)}"


def cause(error: BaseException) -> str:
    """Return the message of a ValueError, which is a refusal in words, and `Type: message` of any other error."""
    return message_of(error) if isinstance(error, ValueError) else said(error)


def a_type(value: object) -> str:
    """Return the type of a value with its article: `a list`, `an int`, `None`."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return text that any file can hold: lone surrogates escaped, and the middle cut out beyond `most` characters."""
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - most} characters ...] {text[-most // 2 :]}"


@contextmanager
def refusing(say: Callable[[BaseException], str], *but: type[BaseException]) -> Iterator[None]:
    """Turn whatever user code in the context raises into `ValueError(say(error))`, except the types `but`.

    That includes SystemExit, and a KeyboardInterrupt that the code raised itself. The one that a signal causes passes.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (Interrupted, *but)):
            raise
        raise ValueError(say(error)) from error
