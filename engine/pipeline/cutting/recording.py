"""How the forward of a cut module runs for each shape of its input: recorded when such an input first comes.

Constants of a recording (sizes, which way an `if` went) are those of one input. So what is handed from layer to layer
says which input that was, in a word of its own, the *key*: kind, shapes and constants of the input, and the mode. Each
rank makes the recording of a key by itself, from the key and a copy of the module without data.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from engine.errors import cause, message_of
from engine.pipeline.cutting.recorder import CannotFollowError, Place, Recorded, Recorder, Step, owned_names
from engine.pipeline.inspection.fake_model import with_remedy
from engine.pipeline.messages.nesting import form_of, nested
from engine.pipeline.modes import begin_training, evaluating

_ONE = threading.RLock()  # ranks may be threads, and a module's modes are set and torch is watched meanwhile


class Stretch:
    """What one layer repeats: `steps`, the numbers that it `takes` from the layer before, and those that it `hands`."""

    def __init__(self, steps: Sequence[Step], takes: list[int], hands: list[int]) -> None:
        self.steps, self.takes, self.hands = steps, takes, hands


class Divided:
    """A recording, divided over layers; `output` is what the last one gives."""

    def __init__(self, recorded: Recorded, begins: Sequence[int]) -> None:
        self.recorded, self.begins = recorded, list(begins)
        steps, ends = recorded.steps, [*begins[1:], len(recorded.steps)]
        live = [[*recorded.inputs], *(recorded.crossing(begin) for begin in begins[1:]), []]
        self.stretches = [
            Stretch(steps[a:b], live[i], live[i + 1]) for i, (a, b) in enumerate(zip(begins, ends, strict=True))
        ]
        self.output = recorded.output


class Recording:
    """The recordings of a module. `skeleton` is a copy of it without data, `whole` are the submodules called whole.

    `layer_of` and `begins`, once they are known: the layer of each call, and the call that begins each layer but the
    first. `owned`: names of the tensors that each layer holds.
    """

    def __init__(self, skeleton: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        self._skeleton, self._mode, self._device = skeleton, mode, device
        self.whole: set[str] = set()
        self.begins: list[Place] = []
        self.layer_of: dict[Place, int] = {}
        self.owned: list[set[str]] = []
        self._found: dict[str, Divided] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Recording:
        return self

    def divided(self, key: str) -> Divided:
        """The recording for inputs of this key. ValueError where the forward takes another way with them."""
        if key not in self._found:
            with _ONE:
                if key not in self._found:
                    self._found[key] = self._divide(key)
        return self._found[key]

    def _divide(self, key: str) -> Divided:
        try:
            recorded = self.follow(key)
        except CannotFollowError as error:
            raise ValueError(f"the model's forward fails on an input of {told(key)}: {reason(error)}") from error
        begins = self.begins_in(recorded)
        self._check(recorded, begins, key)
        return Divided(recorded, begins)

    def begins_in(self, recorded: Recorded) -> list[int]:
        """The step that begins each layer; one whose first call is left out begins with the next one."""
        begins, calls = [0], {place: index for index, place in recorded.calls().items()}
        for place in reversed(self.begins):
            begins.insert(1, calls.get(place, begins[1] if len(begins) > 1 else len(recorded.steps)))
        return begins

    def _check(self, recorded: Recorded, begins: list[int], key: str) -> None:
        """Each layer must be able to do its part of this recording."""

        def layer_at(index: int) -> int:
            return max(layer for layer, begin in enumerate(begins) if begin <= index)

        for index, place in recorded.calls().items():
            if begins != sorted(begins) or self.layer_of.get(place) != layer_at(index):
                raise ValueError(
                    f"the model runs its submodules in another order for an input of {told(key)} ({place[0]} is called "
                    "where it was not when the model was cut): what each stage runs must not depend on shapes or mode"
                )
        for layer, stretch in enumerate(Divided(recorded, begins).stretches):
            if missing := sorted(owned_names(stretch.steps) - self.owned[layer]):
                raise ValueError(
                    f"the model reads {missing[0]} for an input of {told(key)}, and did not when it was cut: which "
                    "parameters a stage reads must not depend on shapes or mode"
                )
        if bad := [begin for begin in begins[1:] if recorded.cannot_begin(begin)]:
            raise ValueError(f"the model changes a tensor in place across step {bad[0]} for an input of {told(key)}")

    def follow(self, key: str) -> Recorded:
        """Run the forward of the skeleton, in a thread of its own: no mode of the caller's sees it."""
        kind, found, failed = self._device.type, [], []
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        training, form, leaves = json.loads(key)

        def run() -> None:
            try:
                with self._mode, torch.autocast(kind, autocast[1], autocast[0]), torch.set_grad_enabled(training):
                    value = nested(form, [_made(leaf, self._device) for leaf in leaves])
                    if training:
                        found.append(Recorder(self._skeleton, self.whole, kind).run(value))
                    else:
                        with evaluating([self._skeleton]):
                            found.append(Recorder(self._skeleton, self.whole, kind).run(value))
            except BaseException as error:  # noqa: BLE001  # raised again by the caller
                failed.append(error)

        thread = threading.Thread(target=run, name="follow", daemon=True)
        with _ONE:
            thread.start()
            thread.join()
        if failed:
            raise failed[0]
        return found[0]


def key_of(value: Any, training: bool) -> str:
    """What a recording depends on: structure, shapes, dtypes and constants of an input, and the mode."""
    leaves = [
        [list(leaf.shape), str(leaf.dtype).removeprefix("torch.")] if isinstance(leaf, Tensor) else {"is": leaf}
        for leaf in pytree.tree_leaves(value)
    ]
    return json.dumps([training, form_of(value), leaves])


def in_evaluation(key: str) -> str:
    """The key of the same input in evaluation."""
    return json.dumps([False, *json.loads(key)[1:]])


def told(key: str) -> str:
    """The shapes of a key, for messages."""
    training, _, leaves = json.loads(key)
    shapes = ", ".join(f"{leaf[0]} {leaf[1]}" for leaf in leaves if isinstance(leaf, list))
    return f"{shapes or 'no tensors'} in {'training' if training else 'evaluation'}"


def _made(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, list):
        return torch.empty(leaf[0], dtype=getattr(torch, leaf[1]), device=device)
    return leaf["is"]


def reason(error: CannotFollowError) -> str:
    """Why a forward cannot be followed, in a line."""
    where = f" (in {error.where})" if error.where else ""
    inner = error.__cause__
    if inner is None:
        return f"{message_of(error)}{where}"
    return f"{with_remedy(inner) if not isinstance(inner, ValueError) else cause(inner)}{where}"


def skeleton_of(module: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, FakeTensorMode]:
    """A copy of a module without data, and the mode that its tensors live in."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        skeleton = copied(module)
    begin_training(skeleton)
    return skeleton, mode
