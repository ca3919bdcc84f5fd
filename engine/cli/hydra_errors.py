"""Turn errors of Hydra and OmegaConf into one line for the user: the bad value, the valid ones, a near one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString, Sweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from engine.cli.arguments import UsageError
from engine.cli.config import CONF, first_line, no_such_choice, unknown

QUOTING = (
    "An override is key=value; quote what the shell or Hydra would take apart: 'partition.split=[layer2,layer3]', "
    "'data.root=\"a, b\"', and with -m each alternative: 'partition.split=[layer2],[layer3]'"
)
SEVERAL = ("experiment",)  # groups of which a list of names is laid over each other


def explain(error: BaseException) -> str | None:
    """Return a message for the user about an error that Hydra raised while it composed the configuration.

    None for an error that no user can cause.
    """
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read as an override: {first_line(error)}. {QUOTING}"
    if isinstance(error, OSError):
        return (
            f"the run folder cannot be used: {error}; give another one: hydra.run.dir=FOLDER (hydra.sweep.dir with -m)"
        )
    if type(error) is ValueError:
        return f"{first_line(error)}. {QUOTING}" if str(error).startswith("Config group override") else None
    for pattern, say in _SAID.items():
        if found := re.match(pattern, str(error)):
            return say(*found.groups())
    for each in (error, error.__cause__):
        if isinstance(each, ConfigKeyError | ConfigAttributeError):
            return _no_such_key(each)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return f"{first_line(error)}: {first_line(error.__cause__)}"
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def check_groups(arguments: Sequence[str]) -> None:
    """Raise UsageError where a group of conf/ is chosen by anything but the name of one file.

    Hydra would end with an error of its own code, or lay the files of a list over each other, and the last of them
    would win without a word. That is what experiments are for: they are several on purpose.
    """
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        group = key.lstrip("+").partition("@")[0]
        if equals and not group:
            raise UsageError(f"{argument}: {QUOTING}")
        if equals and _choices(group):
            _check_choice(group, argument)


def _check_choice(group: str, argument: str) -> None:
    try:
        given: Any = OverridesParser.create().parse_override(argument).value()
    except HydraException:
        return  # which Hydra tells
    for value in given.list if isinstance(given, ChoiceSweep) else [given]:
        names = _names(value)
        if (
            isinstance(value, str | QuotedString | dict | Sweep | Glob)
            or len(names) == 1
            or (names and group in SEVERAL)
        ):
            continue
        sweep = f"; for a job with each: -m {group}={','.join(names)}" if names else ""
        raise UsageError(f"{argument}: {group} is chosen by the name of a file: {', '.join(_choices(group))}{sweep}")


def _names(value: object) -> list[str]:
    """Return a list's items where all of them are names, else nothing."""
    words = value if isinstance(value, list) else []
    names = [word.text if isinstance(word, QuotedString) else word for word in words]
    return names if all(isinstance(name, str) for name in names) else []


def _choices(group: str) -> list[str]:
    """Return the names of the files of a group of conf/."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml")) if group else []


def _several(argument: str) -> str:
    """Explain alternatives that were given without -m."""
    key, _, values = argument.partition("=")
    other = "" if _choices(key) else f"; for one list: '{key}=[{values}]', for one text: '{key}=\"{values}\"'"
    return f"{argument} is several values: for a job with each, add -m{other}"


def _again(group: str, name: str) -> str:
    """Explain a choice that was added (+group=name) to the one that there is."""
    return f"+{group}={name}: {group} is chosen already; to change that: {group}={name}"


# How a message of Hydra's begins -> ours, of what it is about.
_SAID: dict[str, Callable[..., str]] = {
    r"Ambiguous value for argument '(.*)'\n": _several,
    r"Multiple values for (\S+)\. To override a value use 'override \S+: (.*)'": _again,
    r"force-add of config groups is not supported: '\+\+([^=]*)=(.*)'": _again,
}


def _missing(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = error.options or _choices(group)  # none are told of a name that is in a list
    return no_such_choice(group, name, options) if options else first_line(error)


def _no_such_key(error: OmegaConfBaseException) -> str:
    parent, full = error.parent_node, str(error.full_key)
    keys = [str(key) for key in parent if key != "hydra"] if isinstance(parent, DictConfig) else []
    at, _, key = full.rpartition(".")
    others = [file.stem for file in sorted((CONF / at).glob("*.yaml")) if at and key in OmegaConf.load(file)]
    remark = f". {' and '.join(f'{at}={name}' for name in others)} would take it" if others else ""
    return unknown("key", full, [f"{at}.{name}" if at else name for name in keys]) + remark
