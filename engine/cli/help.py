"""The keys as `--help` lists them, and their defaults as conf/ has them."""

from __future__ import annotations

import json
import textwrap
from functools import cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from engine.cli.config import CONF
from engine.settings import KEYS, Key

WIDTH, COLUMN = 116, 34  # characters of a line, and of its part that names the key


def groups() -> dict[str, str | None]:
    """Return the choice of each group in conf/config.yaml: name of the group -> name of its file, or None."""
    entries = OmegaConf.load(CONF / "config.yaml").defaults
    found = {str(name): choice for entry in entries if isinstance(entry, DictConfig) for name, choice in entry.items()}
    return {name: choice for name, choice in found.items() if " " not in name}


@cache
def composed_defaults() -> DictConfig:
    """Return conf/config.yaml with the chosen file of each group merged in, without Hydra's own node."""
    root = OmegaConf.load(CONF / "config.yaml")
    assert isinstance(root, DictConfig)
    for name in ("defaults", "hydra"):
        root.pop(name)
    chosen = {name: OmegaConf.load(CONF / name / f"{choice}.yaml") for name, choice in groups().items() if choice}
    merged = OmegaConf.merge(root, chosen)
    assert isinstance(merged, DictConfig)
    return merged


def default(path: str) -> str:
    """Return the default of a key in YAML's words; an empty text where no chosen file has the key."""
    if path in groups():
        return _word(groups()[path])
    missing = object()
    value = OmegaConf.select(composed_defaults(), path, default=missing)
    return "" if value is missing else _word(value)


def _word(value: Any) -> str:
    if isinstance(value, DictConfig):
        return ""
    if isinstance(value, ListConfig):
        return f"[{','.join(map(str, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def meaning(key: Key) -> str:
    """Return what a key means, with its choices and the ends of its range."""
    choices = [f"one of {', '.join(key.choices)}"] if len(key.choices) > 1 else []
    above = [] if key.above is None else [f"above {key.above:g}"]
    return "; ".join([key.meaning, *choices, *above, *([] if key.at_most is None else [f"at most {key.at_most:,.0f}"])])


def help_keys() -> str:
    """Return one paragraph per key: `path=default`, what it means, its choices."""
    lines: list[str] = []
    for path, key in KEYS.items():
        if path in groups() or any(other.startswith(f"{path}.") for other in KEYS):
            continue  # Hydra lists the files of the groups, a user's own among them
        head = f"{path}={value}" if (value := default(path)) else path
        rows = textwrap.wrap(meaning(key), WIDTH - COLUMN)
        if len(head) > COLUMN - 2:
            lines.append(head)
            head = ""
        lines += [f"{head if not index else '':{COLUMN}}{row}" for index, row in enumerate(rows)]
    return "\n".join(lines).replace("$", "$$")
