"""Training and evaluation mode of modules whose makers may have left some of them in evaluation (frozen BatchNorm).

Each module keeps its own flag: evaluation saves and restores them, where `module.train()` would set all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


def begin_training(module: nn.Module) -> None:
    """Put a module that was just built into training mode.

    What its maker has put into evaluation stays there, and so does what its own `train()` puts there.
    """
    left = _flags([module])
    module.train()
    for part, training in left.items():
        part.training = part.training and training


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Evaluation mode within; afterwards every module is in the mode that it was in."""
    modules = list(modules)
    before = _flags(modules)
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()  # some do more in it than set the flag
        for part, training in before.items():
            part.training = training


def own_mode(module: nn.Module) -> str:
    """`train` or `eval`, where a module's own puts other parts into training or evaluation than nn.Module's would."""
    before = _flags([module])
    try:
        for name, mode in (("train", True), ("eval", False)):
            if getattr(type(module), name) is getattr(nn.Module, name):
                continue
            getattr(module, name)()
            found = _flags([module])
            nn.Module.train(module, mode)
            if found != _flags([module]):
                return name
    finally:
        for part, training in before.items():
            part.training = training
    return ""


def _flags(modules: Iterable[nn.Module]) -> dict[nn.Module, bool]:
    return {part: part.training for module in modules for part in module.modules()}
