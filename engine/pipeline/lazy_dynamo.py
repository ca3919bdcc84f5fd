"""Put off the import of torch._dynamo, torch's compiler, until something is compiled.

FakeTensorMode reads one of its settings, and every `Optimizer.step` names it, although nothing is compiled. Importing
the package costs 2 to 3 s of processor in every process. Until it is needed, a stand-in takes its place:

    torch._dynamo.graph_break, .disable     what they are outside of a compilation: nothing, and the function itself
    torch._dynamo.config                    the real module of settings, which imports little
    any other attribute or submodule        imports the real package, which then replaces the stand-in

`torch.compile` asks for another attribute, so a model that compiles itself works as ever.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"
_loading = threading.RLock()


class _StandIn(ModuleType):
    """What `torch._dynamo` is until something of it is needed that is not here."""

    def graph_break(self, *_: Any, **__: Any) -> None:
        """End the graph that is being traced: none is."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """`fn`, kept out of compilations once there can be any; a decorator where no function is given."""
        if fn is None:
            return lambda function: self.disable(function, recursive, **options)
        real: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def direct(*args: Any, **kwargs: Any) -> Any:
            nonlocal real
            if real is None:
                if sys.modules.get(NAME) is self:
                    return fn(*args, **kwargs)
                real = importlib.import_module(NAME).disable(fn, recursive, **options)
            return real(*args, **kwargs)

        return direct

    def __getattr__(self, name: str) -> Any:
        # What looks through all loaded modules (warnings, pytest, inspect) asks for names like __warningregistry__.
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        return getattr(self._replaced(), name)

    def _replaced(self) -> ModuleType:
        with _loading:
            if sys.modules.get(NAME) is self:
                # The settings are imported again with the package, which sets them as an attribute of itself.
                del sys.modules[NAME], sys.modules[f"{NAME}.config"]
            return importlib.import_module(NAME)


def put_off() -> None:
    """Install the stand-in, where torch._dynamo has not been imported yet.

    Call it before the first FakeTensorMode and the first optimizer of a process.
    """
    if NAME in sys.modules or (spec := importlib.util.find_spec(NAME)) is None or spec.origin is None:
        return
    settings = importlib.util.spec_from_file_location(f"{NAME}.config", Path(spec.origin).with_name("config.py"))
    if settings is None or settings.loader is None:
        return
    stand_in = _StandIn(NAME)
    stand_in.__spec__, stand_in.__file__ = spec, spec.origin
    config = importlib.util.module_from_spec(settings)
    sys.modules[NAME], sys.modules[f"{NAME}.config"] = stand_in, config
    try:
        settings.loader.exec_module(config)
    except (ImportError, AttributeError, NameError):  # a torch whose settings need the package: it is imported as usual
        del sys.modules[NAME], sys.modules[f"{NAME}.config"]
        return
    stand_in.config = config  # type: ignore[attr-defined]
    torch._dynamo = stand_in
