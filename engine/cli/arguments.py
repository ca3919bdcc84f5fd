"""Sort the arguments of the command line for Hydra's parser: flags first, then overrides.

Hydra's parser takes overrides in one group only: `a=1 -m b=2` is an error to it, told with all of its usage. So flags
go first here, wherever they were. A folder that is named by nothing would be the one the run was started from.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
NOTHING = ("", "null", "none", "~")


class UsageError(ValueError):
    """A command line that cannot be parsed; the message says why."""


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Return flags with their values, then overrides, both in the order given. Raises UsageError."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    flags: list[str] = []
    overrides: list[str] = []
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word == "-":
            overrides.append(_override(word))
            continue
        flags.append(word)
        flags += itertools.islice(words, _values(parser, word))
    parser.parse_args([*flags, *overrides])
    return [*flags, *overrides]


def asked_for_version(arguments: Sequence[str]) -> bool:
    """Return whether `--version` is among the flags, in any abbreviation; Hydra would tell its own."""
    return any(len(word) > 2 and "--version".startswith(word) for word in arguments)


def _values(parser: argparse.ArgumentParser, word: str) -> int:
    """Return how many values follow the flag `word`, which may be abbreviated as argparse allows."""
    for action in parser._actions:
        for option in action.option_strings:
            if word == option or (word.startswith("--") and option.startswith(word)):
                return int(action.nargs is None)
    return 0


def _override(word: str) -> str:
    key, equals, value = word.partition("=")
    if equals and key.lstrip("+") in FOLDERS and value.strip("'\" ").lower() in NOTHING:
        raise UsageError(
            f"{word} names no folder: the run's files would lie among your own; give a name, or leave it out"
        )
    return word


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message}; a command line is flags and key=value: see --hydra-help for the flags")
