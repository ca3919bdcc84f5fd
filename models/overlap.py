"""A forward and a backward at the same time, for schedules that pair them (dualpipe, dualpipe_v); for any model.

    +model.overlap._target_=models.overlap.in_thread

Worth it where neither of the two keeps its device busy alone: a second core, waits inside layers, small kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_thread(layers: Sequence[Callable[[Any], Any]], value: Any, backward: Callable[[], None]) -> Any:
    """Run the backward in a thread of its own and the layers in this one; an error of either ends both."""
    with ThreadPoolExecutor(1, thread_name_prefix="backward") as thread:
        behind = thread.submit(backward)
        for layer in layers:
            value = layer(value)
        behind.result()
    return value
