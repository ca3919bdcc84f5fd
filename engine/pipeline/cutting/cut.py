"""From an ordinary module to layers: which submodules are called whole, and where layers begin.

    module ─> followed once with an input like those of the run ─> a layer begins at each call of a submodule
                  └─ where its own code cannot be followed: it is called whole, and the forward followed anew

Called whole are the elements of ModuleLists and Sequentials, and whatever holds none of these; what holds them is
followed inside. `names` in `opened` (those of a split) are reached by following the submodules that hold them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from engine.errors import a_type, refusing, said
from engine.pipeline.cutting.part import Part, hold
from engine.pipeline.cutting.recorder import CannotFollowError, Place, Recorded, named_tensors, owned_names
from engine.pipeline.cutting.recording import Divided, Recording, in_evaluation, reason, skeleton_of
from engine.pipeline.cutting.values import signature_of
from engine.pipeline.modes import own_mode

MOST_LISTED = 40
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LISTS = (nn.ModuleList, nn.ModuleDict)


def cut(
    module: nn.Module,
    key: str,
    opened: Sequence[str],
    without_data: Callable[[nn.Module], nn.Module],
    device: torch.device,
) -> list[tuple[str, Part]]:
    """The layers of a module, for inputs like the one of `key` (see `key_of`), first to last: (name, layer).

    `without_data` copies a module without its tensors' data. ValueError, with a list of layers to start from, where the
    forward cannot be followed.
    """
    with refusing(lambda error: f"{a_type(module)} cannot be cut: it cannot be copied: {said(error)}"):
        skeleton, mode = skeleton_of(module, without_data)
    recording = Recording(skeleton, mode, device)
    recording.whole = set(_whole(skeleton, "", opened))
    recorded = _followed(skeleton, recording, key)
    begins = _begins(module, recorded)
    calls = recorded.calls()
    recording.begins = [calls[begin] for begin in begins[1:]]
    divided = Divided(recorded, begins)
    recording.layer_of = {
        place: max(layer for layer, begin in enumerate(begins) if begin <= index) for index, place in calls.items()
    }
    names = _names(module, divided, calls)
    signature = signature_of(module.forward)
    parts = [Part(i, i == len(names) - 1, recording, signature) for i in range(len(names))]
    _hand_out(module, parts, [divided, *_evaluated(recording, key)], recording)
    return list(zip(names, parts, strict=True))


def _whole(module: nn.Module, at: str, opened: Sequence[str]) -> Iterator[str]:
    """Names of the submodules that are called whole."""
    for name, child in module.named_children():
        path = f"{at}.{name}" if at else name
        if isinstance(child, _LISTS):
            for key, element in child.named_children():
                yield from _element(element, f"{path}.{key}", opened, listed=True)
        else:
            yield from _element(child, path, opened, listed=isinstance(module, nn.Sequential))


def _element(module: nn.Module, name: str, opened: Sequence[str], listed: bool) -> Iterator[str]:
    wanted = any(each.startswith(f"{name}.") for each in opened)
    holds = isinstance(module, nn.Sequential) or any(isinstance(part, _LISTS) for part in module.modules())
    holds = holds or any(isinstance(part, nn.Sequential) for part in module.children())
    if not beyond(module) and (wanted or (holds and not listed)):
        yield from _whole(module, name, opened)
    else:
        yield name


def beyond(module: nn.Module) -> str:
    """What a module does besides its class's forward, in words: it is lost where its parts run on different ranks."""
    for name in ("forward", "__call__", "train", "eval"):
        if name in vars(module):
            return f"a {name} of its own"
    if own := own_mode(module):
        return f"a {own} of its own"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "hooks on it"
    if nn.modules.module._has_any_global_hook():
        return "hooks that were registered for all modules"
    return ""


def _followed(module: nn.Module, recording: Recording, key: str) -> Recorded:
    """The forward, followed as far inside as its code can be."""
    if more := beyond(module):
        raise _refusal(module, f"it has {more}, which is lost where its parts run on different ranks")
    while True:
        try:
            return recording.follow(key)
        except CannotFollowError as error:
            if not error.where:
                raise _refusal(module, reason(error)) from error
            inside = {name for name in recording.whole if name.startswith(f"{error.where}.")}
            recording.whole = (recording.whole - inside) | {error.where}


def _refusal(module: nn.Module, why: str) -> ValueError:
    kind = type(module).__name__
    children = [name for name in _whole(module, "", ()) if any(True for _ in module.get_submodule(name).parameters())]
    listed = "\n".join(f'        ("{name}", lambda: whole.get_submodule("{name}")),' for name in children[:MOST_LISTED])
    more = f"\n        # and {len(children) - MOST_LISTED} more" if len(children) > MOST_LISTED else ""
    return ValueError(
        f"{kind} cannot be cut by following its forward: {why}. Give its layers yourself; a list to start from, to "
        f"which belongs what its forward does between them:\n\ndef layers():\n    whole = {kind}(...)\n"
        f"    return [\n{listed}{more}\n    ]"
    )


def _begins(module: nn.Module, recorded: Recorded) -> list[int]:
    """The steps at which layers begin: at a call, unless what a layer holds would be on both sides."""
    calls = list(recorded.calls().items())
    if not calls:
        return [0]
    held = [_state(module, place) for _, place in calls]
    begins = [0]
    for number, (index, _) in enumerate(calls[1:], start=1):
        before, behind = set().union(*held[:number]), set().union(*held[number:])
        if not before & behind and not recorded.cannot_begin(index):
            begins.append(index)
    return begins


def _state(module: nn.Module, place: Place) -> set[int]:
    """What a submodule holds that must stay in one place: what it may change. Parameters can have copies (`ties`)."""
    part = module.get_submodule(place[0])
    return {id(tensor) for _, tensor in named_tensors(part) if not isinstance(tensor, nn.Parameter)}


def _names(module: nn.Module, divided: Divided, calls: dict[int, Place]) -> list[str]:
    names = []
    for begin, end in zip(divided.begins, [*divided.begins[1:], len(divided.recorded.steps)], strict=True):
        first = next((place for index, place in calls.items() if begin <= index < end), None)
        if first is None:
            names.append(type(module).__name__)
        else:
            names.append(first[0] if first[1] == 0 else f"{first[0]} again" + f" {first[1]}" * (first[1] > 1))
    return names


def _evaluated(recording: Recording, key: str) -> list[Divided]:
    """The forward in evaluation, which may read other tensors; none where it fails or is in another order."""
    try:
        recorded = recording.follow(in_evaluation(key))
    except CannotFollowError:
        return []
    begins = recording.begins_in(recorded)
    return [Divided(recorded, begins)] if begins == sorted(begins) else []


def _hand_out(module: nn.Module, parts: list[Part], found: list[Divided], recording: Recording) -> None:
    """Give each part what its steps read. What nothing reads goes to the first, so that no name is lost."""
    tensors = dict(named_tensors(module))
    lasting = set(module.state_dict())
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}

    def persistent(name: str) -> Any:
        return None if name not in buffers and not isinstance(tensors[name], nn.Parameter) else name in lasting

    for part in parts:
        part.training = module.training
        steps = [step for divided in found for step in divided.stretches[part._part_number].steps]
        for step in steps:
            if step.call is not None:
                hold(part, step.call, module.get_submodule(step.call))
        for name in sorted(owned_names(steps)):
            hold(part, name, tensors[name], persistent(name))
    taken = {name for part in parts for name, _ in named_tensors(part)}
    homes = {id(tensor): part for part in reversed(parts) for _, tensor in named_tensors(part)}
    for name, tensor in reversed(named_tensors(module)):
        if name not in taken:
            hold(homes.get(id(tensor), parts[0]), name, tensor, persistent(name))
    recording.owned = [{name for name, _ in named_tensors(part)} for part in parts]
