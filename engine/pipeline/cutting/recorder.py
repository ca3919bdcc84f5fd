"""One forward of a module, followed under FakeTensorMode: a list of steps that can be repeated with real tensors.

    x ─> embed ─> + position ─> block 0 ─> block 1 ─> norm ─> [:, 0] ─> head        steps, in order
         call     function      call       call       call    function  call

A *call* runs a submodule whole, as it is: with its hooks, its mode, its buffers and what it draws. What lies between
calls is followed function by function, as torch's operators are called (not as they are built up inside), so whatever
watches those sees the same as in the unsplit module. Python runs as it is: an `if` on a shape or on a keyword goes one
way, sizes and dtypes become constants. So a recording is that of one set of input shapes, in one mode.

torch.fx follows symbols and cannot see sizes; torch.export follows operators, so that the calls with their hooks and
modes, and with them masks and statistics, are frozen into the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from engine.errors import a_type
from engine.pipeline.cutting.values import PLAIN, Own, Ref, call_of, leaves, mapped, odd_in, signature_of, tensors_in
from engine.pipeline.inspection.changes import memory_of

Autocast = tuple[bool, torch.dtype]
Place = tuple[str, int]  # a call: the submodule's name, and how many calls of it came before


@dataclass(slots=True)
class Step:
    """A call of the submodule `call`, or of `function`, with the numbers of the tensors that come out (`results`)."""

    call: str | None
    function: Callable[..., Any] | None
    args: Any
    kwargs: Any
    results: list[int]
    without_grad: bool = False  # inside torch.no_grad()
    autocast: Autocast | None = None  # where it differs from the forward's own

    def context(self, device: str) -> AbstractContextManager[Any]:
        """What the step runs in, besides what the whole forward runs in."""
        if self.autocast is not None:
            enabled, dtype = self.autocast
            return torch.autocast(device, dtype, enabled)
        return torch.no_grad() if self.without_grad else nullcontext()


@dataclass
class Recorded:
    """The steps of a forward. `inputs`: the numbers of the input's tensors; `output`: what comes out, with `Ref`s.

    `written`: (step, memory) of what is changed in place; `memory`: of each number.
    """

    steps: list[Step] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    output: Any = None
    written: list[tuple[int, int]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @cached_property
    def _lives(self) -> list[tuple[int, int]]:
        """Of each number: the step that makes it, -1 for the input, and the last one that reads it."""
        made = dict.fromkeys(self.inputs, -1)
        last = dict.fromkeys(_numbers_in(self.output), len(self.steps))
        for index, step in reversed(list(enumerate(self.steps))):
            for number in _numbers_in((step.args, step.kwargs)):
                last.setdefault(number, index)
        for index, step in enumerate(self.steps):
            for number in step.results:
                made.setdefault(number, index)
        return [(made[number], last.get(number, -1)) for number in range(len(self.memory))]

    def crossing(self, step: int) -> list[int]:
        """The numbers that are there before a step and still read by it or behind it."""
        return [number for number, (made, last) in enumerate(self._lives) if made < step <= last]

    def cannot_begin(self, step: int) -> bool:
        """Whether a step cannot begin a layer: from here on one of several views of a memory is changed in place.

        What crosses a boundary arrives as tensors of their own, so the others would not change with it.
        """
        written = {memory for at, memory in self.written if at >= step}
        memories = [self.memory[number] for number in self.crossing(step)]
        return any(memories.count(memory) > 1 for memory in written)

    def calls(self) -> dict[int, Place]:
        """Index of the step -> place, of each call."""
        found: dict[int, Place] = {}
        before: dict[str, int] = {}
        for index, step in enumerate(self.steps):
            if step.call is not None:
                before[step.call] = before.get(step.call, -1) + 1
                found[index] = step.call, before[step.call]
        return found


class CannotFollowError(Exception):
    """A forward cannot be followed, and `where`: the submodule whose own code was running ("" for the whole)."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


class Recorder(TorchFunctionMode):
    """Follows one forward of `root`, a module of fake tensors; `whole` are the submodules that are called as they are.

    `device` is the kind of device that autocast is asked for.
    """

    def __init__(self, root: nn.Module, whole: Iterable[str], device: str) -> None:
        super().__init__()
        self._root, self._device, self._whole = root, device, set(whole)
        self.found = Recorded()
        self._own = {id(tensor): name for name, tensor in named_tensors(root)}
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an id is that of one tensor only while it lives
        self._where: list[str] = [""]  # whose forward is running
        self._inside = False  # a call that is recorded as a whole
        self._usual = self._autocast()

    def run(self, value: Any) -> Recorded:
        """Follow the forward on an input. CannotFollowError where that is not possible."""
        args, kwargs = call_of(signature_of(self._root.forward), value)
        self.found.inputs = [self._number(tensor) for tensor in tensors_in((args, kwargs))]
        modules = [(name, part) for name, part in self._root.named_modules() if name]
        try:
            for name, part in modules:
                part._compiled_call_impl = self._called(name, part)  # what a module's __call__ looks for first
            before = {name: id(tensor) for name, tensor in named_tensors(self._root)}
            with self, _seeing_functions(self._apply):
                output = self._root(*args, **kwargs)
            self._check_assigned(before)
            self.found.output = mapped(output, self._reference)
        except CannotFollowError:
            raise
        except Exception as error:
            raise CannotFollowError("", self._where[-1]) from error
        finally:
            for _, part in modules:
                part._compiled_call_impl = None
        return self.found

    def _check_assigned(self, before: Mapping[str, int]) -> None:
        """What a followed module's code assigns to it would be lost: repeated are only torch's operators."""
        for name, tensor in named_tensors(self._root):
            inside = any(name.startswith(f"{each}.") for each in self._whole)
            if before.get(name) != id(tensor) and not inside:
                raise CannotFollowError(
                    f"its forward assigns {name}: change it in place, or let a submodule do so", name.rpartition(".")[0]
                )

    def _called(self, name: str, module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return module._call_impl(*args, **kwargs)
            if name not in self._whole:
                self._where.append(name)
                result = module._call_impl(*args, **kwargs)
                self._where.pop()
                return result
            with torch._C.DisableTorchFunction():
                odd = odd_in((args, kwargs))
            if odd is not None:
                raise self._refused(
                    f"{name} is given {a_type(odd.value)}, which cannot be handed from stage to stage (a cache is left "
                    "out by use_cache=False in a library's configuration)"
                )
            return self._follow(name, None, args, kwargs, module._call_impl)

        return call

    def _apply(
        self, function: type[torch.autograd.Function], run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """An autograd function is one step: its backward is its own."""
        if self._inside:
            return run(*args, **kwargs)
        odd = [leaf for leaf in leaves((args, kwargs)) if not isinstance(leaf, (Tensor, *PLAIN))]
        if odd:  # a function that is run again later (torch.utils.checkpoint) would be the copy's
            raise self._refused(f"{function.__name__} is given {a_type(odd[0])}: let a submodule do that")

        def again(*args: Any, **kwargs: Any) -> Any:
            return function.apply(*args, **kwargs)  # as it is then: now it is `_seeing_functions`'s

        return self._follow(None, again, args, kwargs, run)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        return self._follow(None, func, args, kwargs, func)

    def _follow(self, name: str | None, function: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        step = Step(name, function, None, None, [], not torch.is_grad_enabled())
        autocast = self._autocast()
        step.autocast = autocast if autocast != self._usual else None
        self._inside = True
        with torch._C.DisableTorchFunction():
            given = tensors_in((args, kwargs))
            versions = [tensor._version for tensor in given]
        result = run(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._inside = False
            changed = [t for t, version in zip(given, versions, strict=True) if t._version != version]
            made = tensors_in(result)
            if made or changed or name is not None:
                step.args, step.kwargs = mapped(args, self._reference), mapped(kwargs, self._reference)
                self.found.written += [(len(self.found.steps), memory_of(tensor)) for tensor in changed]
                step.results = [self._number(tensor) for tensor in made]
                self.found.steps.append(step)
        return result

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
            self.found.memory.append(memory_of(tensor))
        return self._numbers[id(tensor)]

    def _reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._numbers:
            return Ref(self._numbers[id(leaf)])
        if id(leaf) in self._own:
            return Own(self._own[id(leaf)])
        if isinstance(leaf, FakeTensor):
            raise self._refused(
                f"a tensor of {list(leaf.shape)} comes from where torch cannot follow it (vmap, jit, "
                "or an object that keeps it): let a submodule do that"
            )
        return leaf  # a constant of the module's code

    def _refused(self, message: str) -> CannotFollowError:
        return CannotFollowError(message, self._where[-1])

    def _autocast(self) -> Autocast:
        return torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)


@contextmanager
def _seeing_functions(apply: Callable[..., Any]) -> Iterator[None]:
    """Hand calls of autograd functions by this thread to `apply`; torch tells function modes nothing of them."""
    usual = torch.autograd.Function.__dict__["apply"]
    here = threading.get_ident()

    def seen(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = partial(usual.__func__, cls)
        return apply(cls, run, *args, **kwargs) if threading.get_ident() == here else run(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(seen)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = usual  # type: ignore[method-assign]


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, buffers and tensors kept as plain attributes, under all of their names; of each the first last."""
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for at, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                found.append((f"{at}.{name}" if at else name, value))
    return found[::-1]


def _numbers_in(value: Any) -> set[int]:
    found: set[int] = set()
    mapped(value, lambda leaf: found.add(leaf.number) if isinstance(leaf, Ref) else None)
    return found


def owned_names(steps: Iterable[Step]) -> set[str]:
    """The names of the tensors of the module's own that these steps read outside calls."""
    found: set[str] = set()
    for step in steps:
        mapped((step.args, step.kwargs), lambda leaf: found.add(leaf.name) if isinstance(leaf, Own) else None)
    return found


def filled(value: Any, refs: Mapping[int, Tensor], own: Callable[[str], Any], device: torch.device) -> Any:
    """The nesting with tensors in place of `Ref` and `Own`, and devices of the recording's kind made `device`."""

    def leaf(item: Any) -> Any:
        if isinstance(item, Ref):
            return refs[item.number]
        if isinstance(item, Own):
            return own(item.name)
        return device if isinstance(item, torch.device) and item.type == device.type else item

    return mapped(value, leaf)
