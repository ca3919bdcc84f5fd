"""Hydra's and OmegaConf's errors in one or two lines: the bad value, the valid ones, a near one."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from engine.arguments import UsageError
from engine.config import CONF, first_line, no_such_choice, unknown

QUOTING = (
    "An override is key=value; quote what the shell or Hydra would take apart: 'partition.split=[layer2,layer3]', "
    "'data.root=\"a, b\"', and with -m each alternative: 'partition.split=[layer2],[layer3]'"
)


def explain(error: BaseException, arguments: Sequence[str]) -> str | None:
    """A message for the user about an error that Hydra raised while it composed the configuration.

    `arguments`: the command line, where the error does not say what it is about. None for what no user can cause.
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
        return _no_name(arguments) if str(error).startswith("Config group override") else None
    for each in (error, error.__cause__):
        if isinstance(each, ConfigKeyError | ConfigAttributeError):
            return _no_such_key(each)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return f"{first_line(error)}: {first_line(error.__cause__)}"
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _missing(error: MissingConfigException) -> str:
    if not error.missing_cfg_file or not error.options:
        return first_line(error)
    group, _, name = error.missing_cfg_file.rpartition("/")
    return no_such_choice(group, name, error.options)


def _no_name(arguments: Sequence[str]) -> str:
    """A group that was given no word: `model=null`, or an override without a key."""
    for argument in arguments:
        group = argument.partition("=")[0]
        files = [file.stem for file in (CONF / group).glob("*.yaml")] if group else []
        if "=" in argument and (not group or (files and not _names_a_file(argument))):
            valid = f"{group} is chosen by the name of a file: {', '.join(sorted(files))}" if files else QUOTING
            return f"{argument}: {valid}"
    return f"a group is chosen by the name of a file. {QUOTING}"


def _names_a_file(argument: str) -> bool:
    """Whether a group is given a word, or several: there may be no such file, but that is another error."""
    return isinstance(OverridesParser.create().parse_override(argument).value(), str | list)


def _no_such_key(error: OmegaConfBaseException) -> str:
    parent, full = error.parent_node, str(error.full_key)
    keys = [str(key) for key in parent if key != "hydra"] if isinstance(parent, DictConfig) else []
    at, _, key = full.rpartition(".")
    others = [file.stem for file in sorted((CONF / at).glob("*.yaml")) if at and key in OmegaConf.load(file)]
    remark = f". {' and '.join(f'{at}={name}' for name in others)} would take it" if others else ""
    return unknown("key", full, [f"{at}.{name}" if at else name for name in keys]) + remark
