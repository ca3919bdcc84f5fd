"""What the parent learns of a model without computing anything: layers, sizes, and what crosses each boundary.

The whole model is built and run under torch's FakeTensorMode: shapes, dtypes, strides and which tensors require grad
come out exactly (also under autocast, where the plain meta device is wrong), and no memory is touched. A layer that
calls an operator which draws random numbers is marked: it will be seeded before every forward. So is one that changes
what it holds (`changes`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from engine.errors import a_type, cause, message_of, refusing, said
from engine.job import Layer, MessageSpec
from engine.pipeline.dtypes import in_precision
from engine.pipeline.inspection.changes import Changes, Holdings, memory_of
from engine.pipeline.losses import Loss
from engine.pipeline.messages.boundary import Message, describe, shapes
from engine.pipeline.modes import begin_training, evaluating
from engine.pipeline.ties import find_ties, prefix_of

_TORCHS_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


_ALONE = threading.RLock()  # ranks may be threads, and what is patched or filtered here belongs to the process
_PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv"))


class OperatorLog(TorchDispatchMode):
    """Log of the operators of a fake pass: which draw, and what they write to.

    Products that torch lets pass only where they are fake raise TypeError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn = False
        self.sparse = ""  # an operator that will give a parameter a sparse gradient
        self.written: dict[int, Tensor] = {}  # by the memory that was written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtypes = {str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, Tensor)}
        if func in _PRODUCTS and len(dtypes) > 1:
            raise TypeError(f"{func} of different dtypes: {', '.join(sorted(dtypes))}")
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs):
            self.drawn = True
        if torch.is_grad_enabled() and _given("sparse", func, args, kwargs) is True and args[0].requires_grad:
            self.sparse = str(func)
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in pytree.tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name)):
                    if isinstance(tensor, Tensor):
                        self.written[memory_of(tensor)] = tensor
        return func(*args, **kwargs)


def _without_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """An attention operator, say, that would draw if its dropout probability were not 0."""
    given = _given("dropout_p", func, args, kwargs)
    return given is not None and not given


def _given(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument `name` of a call of an operator; None where it has none of that name."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


class FakeModel:
    """The model under FakeTensorMode: `names`, `modules`, and passes through them."""

    def __init__(
        self,
        factories: Callable[[], Sequence[tuple[str, Callable[[], nn.Module]]]],
        device: torch.device,
        dtype: torch.dtype | None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device, self._dtype, self._autocast = device, dtype, autocast
        self.draws: set[int] = set()  # layers that draw random numbers in training
        self._sends: dict[int, tuple[int, int]] = {}  # of a training pass, by layer
        self.changes: dict[int, Changes] = {}  # by layer: what its forward in training changes
        self.random_loss = False  # whether the loss may draw: it did, or it could not be watched to its end
        with _ALONE, quiet(), self._mode, torch.device(device), _convertible():
            made = factories()
            self.names = [name for name, _ in made]
            built = [_built(name, factory) for name, factory in made]
            self.ties = find_ties(self.names, built)
            cast: dict[Tensor, Tensor] = {}  # by what it is the cast of: layers may share tensors
            self.modules = [_cast(module, device, dtype, cast) for module in built]
            for module in self.modules:
                begin_training(module)
        if len(set(self.names)) != len(self.names):
            twice = sorted({n for n in self.names if self.names.count(n) > 1})
            raise ValueError(f"layer names must differ; given more than once: {', '.join(twice)}")

    @property
    def parameters(self) -> list[int]:
        """Elements per layer."""
        return [sum(p.numel() for p in module.parameters()) for module in self.modules]

    @property
    def trainable(self) -> list[Tensor]:
        """The (fake) parameters that require grad, in model order."""
        every = (p for module in self.modules for p in module.parameters())
        return list(dict.fromkeys(p for p in every if p.requires_grad))

    @property
    def state(self) -> dict[str, Any]:
        """Name in the unsplit model -> (fake) parameter or persistent buffer, or whatever else a layer keeps so."""
        return {
            prefix_of(name, module) + key: value
            for name, module in zip(self.names, self.modules, strict=True)
            for key, value in module.state_dict().items()
        }

    def layers(self) -> tuple[Layer, ...]:
        """What a job holds of each layer.

        Call it after the training passes, which find the layers that draw and, as of the last pass, what each would
        send.
        """
        return tuple(
            Layer(
                name,
                sum(p.numel() for p in m.parameters()),
                sum(p.requires_grad for p in m.parameters()),
                i in self.draws,
                self._sends.get(i),
            )
            for i, (name, m) in enumerate(zip(self.names, self.modules, strict=True))
        )

    def boundaries(
        self, sample: tuple[Any, Any], rows: int, split: Sequence[int], training: bool, loss: Loss | None
    ) -> tuple[MessageSpec, ...]:
        """What each stage of `split` hands on for a micro-batch of `rows` samples like `sample` = (input, target).

        ValueError naming the layer that cannot run, or the loss where it cannot take the output.
        """
        return self.handed_on(lambda: self._batches(sample, rows), rows, split, training, loss)

    def handed_on(
        self,
        batch: Callable[[], tuple[Any, Any]],
        rows: int,
        split: Sequence[int],
        training: bool,
        loss: Loss | None,
    ) -> tuple[MessageSpec, ...]:
        """What each stage hands on for a fake micro-batch (input, target), which `batch` makes under FakeTensorMode."""
        ends = {start - 1 for start in split[1:]} | {len(self.modules) - 1}
        specs = []
        tried = None if loss is None else loss.apart(training)
        mode = nullcontext() if training else evaluating(self.modules)
        with _ALONE, quiet(), self._mode, torch.set_grad_enabled(training), self._autocast(), mode:
            value, target = batch()
            for index, module in enumerate(self.modules):
                value = self._through(index, module, value, rows)
                if index in ends:
                    specs.append(describe(value))
                if training:
                    self._see(index, value)
            self._try_loss(tried, value, target)
        return tuple(specs)

    def output(self, sample: tuple[Any, Any], rows: int) -> MessageSpec:
        """What the model gives in training for so many samples."""
        sends = dict(self._sends)
        try:
            return self.boundaries(sample, rows, [0], True, None)[-1]
        finally:
            self._sends = sends

    def _try_loss(self, loss: Loss | None, output: Any, target: Any) -> None:
        """Call the loss on a fake output and target, and note whether it draws random numbers.

        One that looks at values can only be tried for real.
        """
        if loss is None:
            return
        given = f"the model's output ({shapes(output)}) and the data's targets ({shapes(target)})"
        try:
            with (
                OperatorLog() as watch,
                refusing(lambda e: f"model.loss fails on {given}: {cause(e)}", *_LOOKS_AT_VALUES),
            ):
                loss(output, target)
            self.random_loss |= watch.drawn
        except _LOOKS_AT_VALUES:
            self.random_loss = True

    def _see(self, index: int, value: Any) -> None:
        """What the layer would send and get back. What cannot cross a boundary is left out."""
        with suppress(ValueError):
            message = Message(describe(value))
            self._sends[index] = message.forward.nbytes, message.backward.nbytes

    def _through(self, index: int, module: nn.Module, value: Any, rows: int) -> Any:
        where = f"layer {self.names[index]!r} fails on a micro-batch of {rows} samples (its input: {shapes(value)})"
        held = Holdings(module)
        with (
            refusing(lambda error: f"{where}: {with_remedy(error)}"),
            OperatorLog() as watch,
            held.saving(),
        ):
            result = module(value)
        if torch.is_grad_enabled() and any(found := held.changes(watch.written)):
            self.changes[index] = found
        if watch.drawn:
            self.draws.add(index)
        if watch.sparse:
            raise ValueError(
                f"layer {self.names[index]!r} makes sparse gradients ({watch.sparse}), which can be neither reduced "
                "over replicas nor clipped: use sparse=False"
            )
        return result

    def _batches(self, sample: tuple[Any, Any], rows: int) -> tuple[Any, Any]:
        given, target = (fake_batch(part, rows, self._device, self._dtype) for part in sample)
        return given, target


def fake_batch(sample: Any, rows: int, device: torch.device, dtype: torch.dtype | None) -> Any:
    """A fake batch of `rows` items like `sample`, collated as a DataLoader does; call it under FakeTensorMode."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty(leaf.shape, dtype=in_precision(leaf.dtype, dtype), device=device)

    # The items are made fake before they are collated: converting a real tensor imports torch's compiler.
    item = pytree.tree_map(
        lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf, sample
    )
    return pytree.tree_map(fake, default_collate([item] * rows))


def _remedy(error: BaseException) -> str:
    """What to do about an error of a layer in which torch names only its own inside; empty where nothing is known."""
    text = message_of(error)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return (
            ". A value decides here what is computed, or of which shape (`if`, item(), tolist(), nonzero(), a mask as "
            "an index), and shapes must be known before the run: compute both and select by torch.where, or multiply "
            "by a mask; to leave a layer out at random, draw a factor per sample"
        )
    if "UninitializedParameter" in text or "UninitializedBuffer" in text:
        return ". A lazy layer finds out its sizes in its first forward, which here is no real one: give it its sizes"
    if ".numpy()" in text:
        return ". What leaves torch in a forward can be neither traced nor differentiated: use torch's operators"
    return ""


def with_remedy(error: BaseException) -> str:
    """What an error of user code says, and what to do about it where that is known."""
    remedy = _remedy(error)
    return f"{said(error).rstrip('.')}{remedy}" if remedy else said(error)


def _built(name: str, factory: Callable[[], nn.Module]) -> nn.Module:
    with refusing(lambda error: f"layer {name!r} cannot be built: {with_remedy(error)}"):
        module = factory()
    if not isinstance(module, nn.Module):
        raise ValueError(f"the factory of layer {name!r} returned {a_type(module)}, not an nn.Module")
    return module


@contextmanager
def _convertible() -> Iterator[None]:
    """Let layers convert themselves while they are built (`.double()`, `.to(...)`).

    torch swaps a fake module's tensors in place, which fails or not by what its caches refer to; here they are replaced
    in the module's tables, as in `_cast`. The run's precision comes afterwards, in the workers too.
    """
    whole = nn.Module._apply
    made: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor -> the tensor, what it was replaced by

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                now = tensor
                while id(now) in made:  # a tensor of several modules is converted once
                    now = made[id(now)][1]
                if now is None:
                    continue
                with torch.no_grad():
                    moved = fn(now)
                if moved is not now:
                    parameter = isinstance(now, nn.Parameter)
                    moved = nn.Parameter(moved, now.requires_grad) if parameter else moved
                    made[id(now)] = now, moved
                table[name] = moved  # type: ignore[assignment]
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = whole  # type: ignore[method-assign]


def _cast(module: nn.Module, device: torch.device, dtype: torch.dtype | None, made: dict[Tensor, Tensor]) -> nn.Module:
    """`dtypes.cast`, which a fake module refuses: parameters and buffers in place, shared ones (`made`) stay so."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                wanted = in_precision(tensor.dtype, dtype)
                if tensor.dtype == wanted and tensor.device.type == device.type:
                    continue
                if tensor not in made:
                    moved = tensor.detach().to(device, wanted)
                    parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(moved, tensor.requires_grad) if parameter else moved
                table[name] = made[tensor]  # type: ignore[assignment]
    return module


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging, at length, what it is about to raise: the error is reported once, by us."""
    _TORCHS_LOG.addFilter(_nothing)
    try:
        yield
    finally:
        _TORCHS_LOG.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False
