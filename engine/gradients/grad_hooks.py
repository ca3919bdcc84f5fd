"""Hearing of each gradient as soon as autograd has added it to `.grad`.

The hook is one of the node that does the adding, not of the parameter: a parameter with hooks of its own would be
treated differently by a split backward. The node lives as long as somebody holds it, which is what `GradHooks` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge


class GradHooks:
    """Hooks that call `added(i)` after each accumulation into `parameters[i].grad`, in the backward's thread.

    `added` is a bound method. Its object is not kept alive: it usually owns the hooks, and Python's collector does not
    see a cycle that leads through the graph's nodes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], added: Callable[[int], None]) -> None:
        self._nodes: list[Any] = [get_gradient_edge(parameter).node for parameter in parameters]
        call = weakref.WeakMethod(added)
        self._handles = [node.register_hook(partial(_call, call, i)) for i, node in enumerate(self._nodes)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()


def _call(method: weakref.WeakMethod[Callable[[int], None]], number: int, *_: Any) -> None:
    added = method()
    if added is not None:
        added(number)
