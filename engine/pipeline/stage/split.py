"""Backward in two halves: the input gradients at once (I), the weight gradients when there is time (W).

    F    a mode routes linear and convolution of parameters through `_Routed`; the rest is plain torch
    I    plain autograd; each `_Routed` node gives its input gradient and puts the weight gradient off   ──► Later
    W    Later.run(): the gradients put off, in the order of the backward, each parameter's total added once

No module is edited, and no graph is walked in parts: I is one ordinary backward, so operators with several outputs,
views and in-place operations are autograd's business as ever. Every number is that of the full backward: the same
kernels with the same operands; contributions of one micro-batch to a parameter are summed in the order in which
autograd sums them, and autograd's own node adds the total to `.grad`.

What is put off are the gradients of leaf tensors used as weight or bias of linear and conv1d/2d/3d, those inside
nn.MultiheadAttention included. Norms, embeddings, recurrent layers and everything else are done in I. So is a
parameter with another use in the same micro-batch (only autograd can sum all of its contributions in order), and one
with hooks.

A function with a backward of its own may put off a part of it too. It opens itself to torch's overrides and says
`takes_later`; while a stage is routed it is called with `later`, to which it gives what can wait, and the tensors
that this needs:

    def scaled(x, later=None):
        if has_torch_function_unary(x):
            return handle_torch_function(scaled, (x,), x)
        return Scaled.apply(x, later)          # in its backward, where `later` is not None: later(work, tensor, ...)
    scaled.takes_later = True

`later` holds those tensors until W and calls work(tensor, ...) there.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.pipeline.stage.activations import storage_bytes
from engine.pipeline.stage.graph import nodes
from engine.pipeline.stage.kernels import Convolution, Kernel, Linear

Work = Callable[..., Any]


class _Entry(NamedTuple):
    """work(*tensors) gives the gradients of `parameters`, in order."""

    work: Work
    tensors: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]


class Later:
    """What I leaves for W, of one stage and one micro-batch."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self.gathering = False  # in I
        self.at_once: set[Tensor] = set()  # leaves whose gradients do not wait

    def backward(self, roots: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        """Run I, the input-gradient half, from `roots` (tensors, or gradient edges).

        Routed as the forward was: a layer that is recomputed in its backward must do again what it did. Gradients that
        a layer takes by itself, in its forward or in such a second one, are none of I's: nothing of them is put off.
        """
        starts = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
        self.gathering, self.at_once = True, _at_once(starts)
        with Routing(self):
            torch.autograd.backward(roots, gradients)
        self.gathering, self.at_once = False, set()

    def put(self, work: Work, *tensors: Tensor) -> None:
        """Do work(*tensors) in W; the protocol's `later`."""
        self._entries.append(_Entry(work, tensors, ()))

    def put_gradients(self, work: Work, tensors: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
        """Work out the gradients of `parameters` in W, and add them there."""
        self._entries.append(_Entry(work, tuple(tensors), tuple(parameters)))

    @property
    def parameters(self) -> set[Tensor]:
        """The parameters whose gradients W will add."""
        return {parameter for entry in self._entries for parameter in entry.parameters}

    @property
    def nbytes(self) -> int:
        """Bytes that are held until W."""
        return storage_bytes(t for entry in self._entries for t in entry.tensors)

    @torch.no_grad()
    def run(self) -> None:
        """Run W, the weight-gradient half.

        A parameter's contributions are summed in their own precision (autocast's, say), as autograd does it.
        """
        awaited = Counter(p for entry in self._entries for p in entry.parameters)
        totals: dict[Tensor, Tensor] = {}
        while self._entries:
            entry = self._entries.popleft()
            gradients = entry.work(*entry.tensors)
            for parameter, gradient in zip(entry.parameters, gradients if entry.parameters else (), strict=True):
                totals[parameter] = totals[parameter] + gradient if parameter in totals else gradient
                awaited[parameter] -= 1
                if not awaited[parameter]:
                    torch.autograd.backward(parameter, totals.pop(parameter).to(parameter.dtype))


def _at_once(roots: Iterable[Any]) -> set[Tensor]:
    """Leaves that I must take care of: what any other node than a routed one gives a gradient to, or what has hooks.

    (Hooks run once for each micro-batch; the node of a leaf runs in I in any case, with nothing to add.) A root may be
    the node of a leaf, where a stage hands on a parameter: that one's gradient arrives from outside.
    """
    roots = list(roots)
    found: set[Tensor] = {root.variable for root in roots if isinstance(root, _ACCUMULATE)}
    for node in nodes(roots):
        routed = isinstance(node, _Routed._backward_cls)
        for place, (following, _) in enumerate(node.next_functions):
            if isinstance(following, _ACCUMULATE):
                leaf = following.variable
                if not (routed and place) or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                    found.add(leaf)
    return found


_ACCUMULATE = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class _Routed(torch.autograd.Function):
    """kernel(x, weight, bias), whose backward puts off the gradients of `weight` and `bias` where it may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel, later: Later) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.kernel, ctx.later, ctx.leaves, ctx.recomputed = kernel, later, (weight, bias), later.gathering
        return kernel.forward(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:  # an absent gradient is not one of zeros
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:3]
        may_wait = ctx.later.gathering and not ctx.recomputed
        put_off = [
            need and may_wait and leaf not in ctx.later.at_once for need, leaf in zip(wanted, ctx.leaves, strict=True)
        ]
        at_once = [need and not deferred for need, deferred in zip(wanted, put_off, strict=True)]
        if any(put_off):
            gradients = partial(_weight_gradients, ctx.kernel, ctx.leaves, put_off)
            ctx.later.put_gradients(gradients, (grad, x), compress(ctx.leaves, put_off))
        parts = ctx.kernel.weight_gradients(grad, x, ctx.leaves[0], at_once) if any(at_once) else (None, None)
        to_x = None if weight is None else ctx.kernel.input_gradient(grad, x, weight.to(grad.dtype))
        return to_x, *parts, None, None


def _weight_gradients(
    kernel: Kernel, leaves: Sequence[Tensor], wanted: Sequence[bool], grad: Tensor, x: Tensor
) -> list[Tensor | None]:
    return list(compress(kernel.weight_gradients(grad, x, leaves[0], wanted), wanted))


class Routing(TorchFunctionMode):
    """While active in this thread, what can be put off in the backward of an operation goes to `later`."""

    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        if getattr(func, "takes_later", False):
            return func(*args, **kwargs, later=self._later.put)
        route = None if types else _ROUTES.get(func)
        return func(*args, **kwargs) if route is None else route(func, self._later, *args, **kwargs)


def _opened(function: Any) -> Any:
    """A copy that does not ask torch for overrides of itself, and so does not hide what it calls from modes."""
    asks = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda _: False)
    names = vars(sys.modules[function.__module__]) | asks
    return FunctionType(function.__code__, names, argdefs=function.__defaults__)


_BACKWARD = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)  # may run a forward again
_OPENED = {hiding: _opened(hiding) for hiding in (F.multi_head_attention_forward, *_BACKWARD)}


def _routable(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether both are real leaves, and the weight is trained. Under vmap and the like a leaf is more than it seems."""
    leaves = weight.is_leaf and weight.requires_grad and (bias is None or bias.is_leaf)
    return leaves and not weight.is_complex() and not torch._C._are_functorch_transforms_active()


def _autocast(x: Tensor) -> Tensor:
    """What autocast makes of an operand. The parameters follow it, inside the routed operation."""
    device = x.device.type
    eligible = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if eligible else x


def _linear(
    func: Any,
    later: Later,
    input: Tensor,  # noqa: A002  # the name that torch gives it
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """As torch: a matrix product of all samples. A bias is part of it, or, for strided samples, added to it after."""
    if not (_routable(weight, bias) and weight.dim() == 2 and input.dim() > 0):
        return func(input, weight, bias)
    x = _autocast(input)
    fused = bias is not None and bias.dim() == 1 and (x.dim() == 2 or x.is_contiguous())
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = _Routed.apply(flat, weight, bias if fused else None, Linear(), later)
    if x.dim() != 2:
        y = y.view(*x.shape[:-1], weight.shape[0])
    return y if fused or bias is None else y + bias.to(y.dtype)


def _convolution(
    func: Any,
    later: Later,
    input: Tensor,  # noqa: A002  # torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    dims = _DIMENSIONS[func]
    if not _routable(weight, bias) or weight.dim() != dims + 2:
        return func(input, weight, bias, stride, padding, dilation, groups)
    x = _autocast(input)
    single = x.dim() == dims + 1
    x = x.unsqueeze(0) if single else x
    dilation = _each(dilation, dims)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [total // 2 for total in totals]
        if any(total % 2 for total in totals):  # an odd one has its extra zero behind
            x = F.pad(x, [zeros for total in reversed(totals) for zeros in (0, total % 2)])
    padding = _each(0 if padding == "valid" else padding, dims)
    y = _Routed.apply(x, weight, bias, Convolution(_each(stride, dims), padding, dilation, groups), later)
    return y.squeeze(0) if single else y


def _each(value: Any, dims: int) -> tuple[int, ...]:
    """A number for each dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


_DIMENSIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_ROUTES: Mapping[Any, Callable[..., Tensor]] = {F.linear: _linear} | dict.fromkeys(_DIMENSIONS, _convolution)
