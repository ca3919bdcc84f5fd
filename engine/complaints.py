"""Hydra's and OmegaConf's errors in one or two lines: the bad value, the valid ones, a near one."""

from __future__ import annotations

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from engine.config import first_line, unknown

QUOTING = (
    "An override is key=value; quote what the shell or Hydra would take apart: 'partition.split=[layer2,layer3]', "
    "'data.root=\"a, b\"', and with -m each alternative: 'partition.split=[layer2],[layer3]'"
)


def explain(error: BaseException) -> str:
    """A message for the user about an error that Hydra raised while it composed the configuration."""
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read as an override: {first_line(error)}. {QUOTING}"
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
    return unknown("choice", name, error.options, shown=f"{group}={name}")


def _no_such_key(error: OmegaConfBaseException) -> str:
    parent, full = error.parent_node, str(error.full_key)
    keys = [str(key) for key in parent if key != "hydra"] if isinstance(parent, DictConfig) else []
    at = full.rpartition(".")[0]
    return unknown("key", full, [f"{at}.{key}" if at else key for key in keys])
