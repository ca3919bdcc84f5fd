"""Compose a command line without running a job: no folder is made, and nothing is started.

Under a launcher every rank has the command line, and rank 0 alone runs it. Two things are asked of it elsewhere: which
code it names (`targets`), and where the run's folder would be (`run_dir`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from engine.cli.arguments import flags_first
from engine.cli.config import CONF
from engine.cli.help import help_keys
from engine.targets import named


def register_resolvers() -> None:
    """Register the interpolations that conf/config.yaml uses: a random token, and the keys for `--help`."""
    OmegaConf.register_new_resolver("engine.token", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("engine.keys", help_keys, replace=True)


def composed(arguments: Sequence[str]) -> DictConfig:
    """Return the composed configuration, Hydra's own node included."""
    register_resolvers()
    given = get_args_parser().parse_args(flags_first(arguments))
    search_path = create_automatic_config_search_path(None, None, given.config_path or str(CONF))
    if given.config_dir is not None:
        search_path.prepend("command-line", f"file://{Path(given.config_dir).absolute()}")
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra.create_main_hydra2(task_name="engine", config_search_path=search_path)
        return hydra.compose_config(
            config_name=given.config_name or "config",
            overrides=given.overrides,
            run_mode=RunMode.RUN,
            with_log_configuration=False,
        )
    finally:
        GlobalHydra.instance().clear()


def run_dir(arguments: Sequence[str]) -> str:
    """Return `hydra.run.dir` with its interpolations unresolved."""
    plain = OmegaConf.to_container(composed(arguments).hydra.run, resolve=False)
    assert isinstance(plain, dict)
    return str(plain["dir"])


def targets(arguments: Sequence[str]) -> dict[str, Any]:
    """Return every `_target_` that the command line names: dotted path -> `_target_`."""
    config = composed(arguments)
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    return {path: OmegaConf.select(config, path) for path in named(plain)}
