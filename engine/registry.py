"""Names of code in tables that are pure data: what is named is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any


def load(name: str) -> Any:
    """Return what "package.module:attribute" names, importing the module."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
