"""What a loss is to the engine: the sum over a micro-batch, and how much was summed. Nothing here divides by M.

    loss(output, target)         the sum, differentiable
    loss.count(target, output)   what it sums over, from the targets alone: known before the forward

The engine divides each sum by the count of the *global* batch before its backward, and nowhere else, so a step equals
that of one process on the whole batch, and a micro-batch without a scored target adds exactly nothing (a mean over
nothing is NaN, and NaN times 0 stays NaN). Counts must add up over samples. Accepted are

    torch's loss classes,   asked for the sum whatever their `reduction` says, mean or sum. Counted are the scored
    loss functions          targets of a classification (with class weights: their sum), the numbers of others
    returns (sum, count)    taken as it is; where it has an attribute `count(target)`, that is asked before the
                            forward, else a copy is called for the count, with a stand-in for the output
    returns one mean        a mean over what its `count(target)` says, else over the samples; the sum is mean * count

So `reduction=sum` trains as `mean` does. For another denominator return (sum, that denominator's share). What a loss
keeps from call to call (a running centre) is moved by training alone: whatever else is asked of it is asked of a copy.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.errors import a_type, refusing, said
from engine.job import MessageSpec, TensorSpec
from engine.pipeline.messages.nesting import template
from engine.targets import build_function, locate, name_of

log = logging.getLogger(__name__)

IGNORED = -100  # torch's own default
_WEIGHTS = ("weight", "pos_weight")

# How torch's mean counts: the targets of a classification, all numbers (output and target have one shape), or samples.
_CLASSES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
}
_NUMBERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.KLDivLoss: F.kl_div,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
}
_SAMPLES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
    nn.MultiLabelMarginLoss: F.multilabel_margin_loss,
    nn.MultiMarginLoss: F.multi_margin_loss,
}
_TORCH = _CLASSES | _NUMBERS | _SAMPLES
_OF_FUNCTION = {function: kind for kind, function in _TORCH.items()}


class Loss(ABC):
    """A loss as the engine uses it; it holds nothing of a micro-batch. Made by `make_loss`."""

    ignore_index = IGNORED
    additive = False  # whether it is known that what it sums adds up over samples

    @abstractmethod
    def __call__(self, output: Any, target: Any) -> Tensor:
        """The sum over the samples: a differentiable scalar."""

    @abstractmethod
    def count(self, target: Any, output: MessageSpec | None) -> float:
        """What the sum runs over. `output` describes what the model gives for these samples (None: not known)."""

    def scored(self, output: Any, target: Any) -> tuple[int, int] | None:
        """(correct, scored) of a classification; None for anything else."""
        return scored(output, target, self.ignore_index)

    @property
    def module(self) -> nn.Module | None:
        """The module in which a user's loss keeps what it moves from call to call, where it is one."""
        return None

    @abstractmethod
    def apart(self, training: bool = True) -> Loss:
        """A copy whose calls leave this one as it is; in evaluation mode where it is not for `training`."""


def make_loss(loss: Mapping[str, Any] | Callable[..., Any], where: str = "model.loss") -> Loss:
    """The loss that a section `{_target_: ..., keywords}` or a callable stands for.

    A `_target_` that is a function still in need of two arguments is the loss itself; anything else is called to get
    it. Raises ValueError for what cannot serve as a loss.
    """
    made = _from_section(loss, where) if isinstance(loss, Mapping) else loss
    if isinstance(made, Loss):
        return made
    function, keywords = (made.func, made.keywords) if isinstance(made, partial) else (made, {})
    if inspect.isfunction(function) or inspect.isbuiltin(function):
        kind = _OF_FUNCTION.get(function)
        made = kind(**with_tensors(keywords)) if kind else made
    if not callable(made):
        raise ValueError(f"{where} is {a_type(made)}, which cannot be called with (output, target)")
    for kind in _TORCH:
        if isinstance(made, kind) and type(made).forward is kind.forward:
            return TorchLoss(made, kind, where)
    if type(made).__module__ == nn.MSELoss.__module__:
        names = ", ".join(sorted(kind.__name__ for kind in _TORCH))
        raise ValueError(
            f"{where}: torch.nn.{type(made).__name__} does not compare one output with one target sample by sample; "
            f"there is: {names}, or a function of (output, target) that returns (sum, count)"
        )
    if isinstance(made, nn.Module) and any(True for _ in made.parameters()):
        raise ValueError(f"{where}: {type(made).__name__} has parameters; make them a layer of the model")
    return UserLoss(made, where)


def _from_section(section: Mapping[str, Any], where: str) -> Any:
    if section.get("_target_"):
        target = locate(section["_target_"], where)
        if target in _OF_FUNCTION or (inspect.isclass(target) and issubclass(target, tuple(_TORCH))):
            section = with_tensors(section, where)
    return build_function(section, 2, where)


def with_tensors(keywords: Mapping[str, Any], where: str = "model.loss") -> dict[str, Any]:
    """Class weights given as a list, as the tensor that torch wants. ValueError where they are no numbers."""
    made = dict(keywords)
    for key in _WEIGHTS:
        if not isinstance(value := keywords.get(key), list):
            continue
        try:
            made[key] = torch.tensor(value, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}.{key}={value} must be a list of numbers") from error
    return made


# ---- torch's own -------------------------------------------------------------------------------------------------


class TorchLoss(Loss):
    """One of torch's loss classes, asked for its sum. `kind`: the class whose forward it has."""

    additive = True

    def __init__(self, module: nn.Module, kind: type[nn.Module], where: str) -> None:
        reduction = str(module.reduction)
        if reduction == "none":
            raise ValueError(f"{where}.reduction=none gives no scalar; leave it at mean")
        if reduction == "sum":
            log.warning("%s.reduction=sum: the engine divides every sum by what the global batch counted", where)
        self._module, self._kind = copy.deepcopy(module), kind
        self._module.reduction = "sum"  # type: ignore[assignment]
        self._per_sample = kind in _SAMPLES or reduction == "batchmean"
        self._fitted: dict[tuple[torch.device, torch.dtype], nn.Module] = {}
        self.ignore_index = getattr(module, "ignore_index", IGNORED)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum over the samples. ValueError where output and target are no tensors that fit each other."""
        for name, value in (("output", output), ("target", target)):
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{self._kind.__name__} takes one tensor as {name}, but is given {a_type(value)}: let the last "
                    "layer or the data set give one, or write a loss that takes it apart"
                )
        if self._kind in _NUMBERS and output.shape != target.shape:
            raise ValueError(
                f"{self._kind.__name__} compares number with number, but the model gives {list(output.shape)} for "
                f"targets of {list(target.shape)}: give them one shape"
            )
        return self._fit(output)(output, target)

    def count(self, target: Tensor, output: MessageSpec | None = None) -> float:
        """What torch's own mean divides by: samples, numbers, or targets not ignored (their class weights)."""
        if self._per_sample:
            return len(target)
        if self._kind in _NUMBERS:
            return target.numel()
        if target.is_floating_point():  # a distribution over the classes, which are dimension 1
            return target.numel() // target.shape[1]
        kept = target != self.ignore_index
        weight: Tensor | None = self._module.weight  # type: ignore[assignment]
        if weight is None:
            return int(kept.sum())
        return float(weight.to(target.device)[target[kept]].sum(dtype=torch.float64))

    def scored(self, output: Any, target: Any) -> tuple[int, int] | None:
        """(correct, scored) of a classification; None for the other classes."""
        return scored(output, target, self.ignore_index, dim=1) if self._kind in _CLASSES else None

    def apart(self, training: bool = True) -> TorchLoss:
        """A copy that has its own weights on each device."""
        made = copy.copy(self)
        made._fitted = {}  # what was fitted to a fake output holds fake weights
        return made

    def _fit(self, output: Tensor) -> nn.Module:
        """The module with its weights on the output's device and in its precision, float32 at least (autocast)."""
        key = (output.device, output.dtype)
        if key not in self._fitted:
            dtype = torch.promote_types(output.dtype, torch.float32)
            module = copy.copy(self._module)  # a deep copy cannot be made beside a fake output
            module._buffers = {
                name: None if weight is None else weight.to(output.device, dtype)
                for name, weight in self._module._buffers.items()
            }
            self._fitted[key] = module
        return self._fitted[key]


# ---- the user's --------------------------------------------------------------------------------------------------


_UNCOPIED = (
    "cannot be copied, which keeps evaluation from what it holds for training; let it hold what copy.deepcopy takes, "
    "and tensors without a graph"
)


class UserLoss(Loss):
    """A callable that returns (sum, count) or one mean; which of them is seen from what it returns."""

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self._function, self._where = function, where
        inner, keywords = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
        self._name = name_of(inner if hasattr(inner, "__qualname__") else type(inner))
        self._own_count: Callable[[Any], Any] | None = getattr(inner, "count", None)
        self._mean = False
        index = keywords.get("ignore_index", getattr(inner, "ignore_index", IGNORED))
        self.ignore_index = index if isinstance(index, int) else IGNORED

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The sum over the samples, or the mean times what is counted."""
        total, count = self._call(output, target)
        if count is not None:
            return total
        counted = self.count(target, None) if self._own_count else samples(target)
        return total * counted if counted else total.new_zeros(())

    def count(self, target: Any, output: MessageSpec | None) -> float:
        """What its count(target) says, else its second result for a stand-in of the output, else the samples."""
        if self._own_count is not None:
            return self._number(self._own_count(target))
        if not self._mean:
            if output is None:
                raise ValueError(f"{self._where}: {self._name} has no count(target), and the output is not known")
            with torch.no_grad():
                device = next((t.device for t in _tensor_leaves(target)), torch.device("cpu"))
                _, count = self.apart()._call(stand_in(output, device), target)
            if count is not None:
                return self._number(count)
            self._mean = True
        return samples(target)

    def apart(self, training: bool = True) -> UserLoss:
        """A deep copy. ValueError where the function cannot be copied."""
        with refusing(lambda error: f"{self._where}: {self._name} {_UNCOPIED} ({said(error)})"):
            function = copy.deepcopy(self._function)
        made = UserLoss(function, self._where)
        made._mean = self._mean
        if made.module is not None and not training:
            made.module.eval()
        return made

    @property
    def module(self) -> nn.Module | None:
        """The function where it is a module, or the module of which it is a method."""
        inner = self._function.func if isinstance(self._function, partial) else self._function
        module = getattr(inner, "__self__", inner)
        return module if isinstance(module, nn.Module) else None

    def _call(self, output: Any, target: Any) -> tuple[Tensor, Any]:
        """(sum, count), or (mean, None)."""
        if isinstance(self._function, nn.Module):
            self._function.to(next((t.device for t in _tensor_leaves(output)), torch.device("cpu")))
        result = self._function(output, target)
        pair = result if isinstance(result, tuple | list) and len(result) == 2 else (result, None)
        if not (isinstance(pair[0], Tensor) and pair[0].numel() == 1):
            what = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"{self._where}: {self._name} returned {what}; it must return (sum, count), or one mean as a scalar"
            )
        return pair[0].reshape(()), pair[1]

    def _number(self, count: Any) -> float:
        value = count.item() if isinstance(count, Tensor) and count.numel() == 1 else count
        if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
            return value
        raise ValueError(f"{self._where}: {self._name} counts {value!r}; a count is a number, 0 or more")


def samples(target: Any) -> int:
    """How many samples a nesting of targets holds: the length of its first tensor."""
    for leaf in _tensor_leaves(target):
        if leaf.ndim:
            return len(leaf)
    raise ValueError("the targets hold no tensor with a batch dimension; return (sum, count) from the loss")


def scored(output: Any, target: Any, ignore_index: int, dim: int | None = None) -> tuple[int, int] | None:
    """(how many targets have the largest output, how many are not ignored); None where that means nothing.

    It means something for outputs of shape [N, ..., C] or [N, C, ...] and class numbers of shape [N, ...]. `dim` is
    the dimension of the classes; None finds it, the last one first.
    """
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return None
    numbers = target.is_floating_point() or target.is_complex() or target.dtype is torch.bool
    if numbers or not output.is_floating_point() or output.ndim < 2:
        return None
    for classes in (-1, 1) if dim is None else (dim,):
        rest = list(output.shape)
        if rest.pop(classes) > 1 and rest == list(target.shape):
            kept = target != ignore_index
            return int(((output.argmax(classes) == target) & kept).sum()), int(kept.sum())
    return None


def _tensor_leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def stand_in(output: MessageSpec, device: torch.device) -> Any:
    """What the model's output might be: equal numbers that add up to 1 over the last dimension, as of probabilities."""

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        dtype = getattr(torch, leaf.dtype)
        value = 1 / max((1, *leaf.shape[-1:])) if dtype.is_floating_point else 0
        return torch.full(leaf.shape, value, dtype=dtype, device=device)

    return pytree.tree_map(make, template(output))
