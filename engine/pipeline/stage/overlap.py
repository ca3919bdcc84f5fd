"""An overlapped pair by the model's own function: forward of one micro-batch and backward of another, together.

`model.overlap` names it; without one the two run one after the other. It is called in training, for each pair, as

    output = overlap(layers, value, backward)

    layers      the forward's layers in order, each a function of what the one before returned (`LayerCall`)
    value       what the first of them takes
    backward    the other micro-batch's whole backward: a function without arguments, to be called once, at any time

and returns what the last layer returned. Where `backward` is called says how the two overlap: between two layers, or
in a thread of its own. (Of CUDA streams it is the forward's that counts: torch runs a backward on the stream on which
its forward ran.) What the function has started must be done, or ordered before whatever the current stream does next,
when it returns. Losses, messages and bookkeeping stay the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from engine.targets import build_function, check_arguments

ARGUMENTS = ("layers", "value", "backward")


@dataclass(frozen=True)
class LayerCall:
    """A layer as an overlap function sees it. Called, it runs as it does without one: seeded, under autocast, routed.

    A function that uses parts of `module` instead has to leave out layers that draw random numbers; their weight
    gradients are then computed in I where the backward comes in halves.
    """

    name: str
    module: nn.Module
    run: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        """The layer's output for `value`, what the layer before returned."""
        return self.run(value)


Overlap = Callable[[Sequence[LayerCall], Any, Callable[[], None]], Any]
Beside = Callable[[Sequence[LayerCall], Any], Any]  # runs the layers of a forward, and something else meanwhile


def make_overlap(section: Mapping[str, Any] | None, where: str = "model.overlap") -> Overlap | None:
    """The function that a section `{_target_: ..., keywords}` stands for; None where there is none.

    Raises ValueError for what cannot be called with (layers, value, backward).
    """
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ValueError(f"{where}={section} is not a section: name a function with {where}._target_=package.function")
    function = build_function(section, len(ARGUMENTS), where)
    check_arguments(function, ARGUMENTS, where)
    return function


def together(overlap: Overlap, layers: Sequence[LayerCall], value: Any, backward: Callable[[], None]) -> Any:
    """Call the function; its output. ValueError where it does not call `backward` exactly once."""
    calls = 0

    def once() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            backward()

    output = overlap(layers, value, once)
    if calls != 1:
        raise ValueError(
            f"model.overlap called backward {calls} times for one pair; each call of the function must call it once"
        )
    return output
