"""Layers and losses that do more than map an input to an output, as `_target_`s: `peculiar.NAME`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from toys import Again, Block, Layers, Tokens

# ---- containers --------------------------------------------------------------------------------------------------


class Doubled(nn.Sequential):
    """A container with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Named(nn.Sequential):
    """A container that only says what is in it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


class Reversed(nn.Sequential):
    """A container that runs its children in another order."""

    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


class Called(nn.Sequential):
    """A container that does something around its forward."""

    def __call__(self, x: Tensor) -> Any:
        return 2 * super().__call__(x)


class Scaled(nn.Sequential):
    """A container with a parameter of its own, which a hook of the first child uses."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(2.0))


class Frozen(nn.Sequential):
    """A container whose children stay in evaluation mode."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


CONTAINERS = {"own": Doubled, "iter": Reversed, "call": Called, "tensors": Scaled, "train": Frozen}
HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda module, given, result: 2 * result),
    "pre": lambda m: m.register_forward_pre_hook(lambda module, given: (2 * given[0],)),
    "backward": lambda m: m.register_full_backward_hook(lambda module, given, result: None),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, given: None),
    "global": lambda m: nn.modules.module.register_module_forward_hook(lambda module, given, result: None),
}


def container(how: str = "plain") -> nn.Module:
    """A container; `how`: plain, named, or what it does besides running its children."""
    if how == "named":
        return Named()
    made = CONTAINERS.get(how, nn.Sequential)(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    if how == "instance":
        made.forward = lambda x: 2 * made[2](made[1](made[0](x)))
    if how in HOOKS:
        HOOKS[how](made)
    return made


class Around(nn.Module):
    """A layer that holds such a container: nothing takes it apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubled(nn.Linear(8, 8), Doubled(nn.Linear(8, 8), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def nested() -> Layers:
    return [("a", Around), ("b", lambda: Doubled(nn.Linear(8, 8), nn.Tanh())), ("head", lambda: nn.Linear(8, 5))]


# ---- complex numbers ---------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """x + Linear(x rotated by a table of complex numbers); a mask and a count beside it, and complex weights."""

    def __init__(self, width: int, trained: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        table = torch.polar(torch.ones(width // 2), torch.arange(width // 2) + 1.0)
        self.table = nn.Parameter(table) if trained else nn.Buffer(table)
        self.mask = nn.Buffer(torch.tensor([True, False]))
        self.seen = nn.Buffer(torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        rotated = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)) if x.dtype == torch.bfloat16 else _pairs(x))
        turned = torch.view_as_real(rotated * self.table).flatten(-2)
        y: Tensor = x + self.linear(turned * self.mask[0] * (self.seen / 3))
        return y


def _pairs(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).contiguous()


def rotary(trained: bool = False, width: int = 8, classes: int = 5) -> Layers:
    return [
        ("a", lambda: Rotary(width, trained)),
        ("b", lambda: Rotary(width, trained)),
        ("head", lambda: nn.Linear(width, classes)),
    ]


class Waves(Tokens):
    """Complex inputs, in single precision."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return torch.complex(x, x.flip(0)).to(torch.complex64), y


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.real + x.imag


def spectral(width: int = 8, classes: int = 5) -> Layers:
    """Complex linear layers on complex inputs: complex tensors and gradients cross the boundaries."""
    return [
        ("a", lambda: nn.Linear(width, width, dtype=torch.complex64)),
        ("b", lambda: nn.Linear(width, width, dtype=torch.complex64)),
        ("c", lambda: nn.Linear(width, width, dtype=torch.complex64)),
        ("real", Real),
        ("head", lambda: nn.Linear(width, classes)),
    ]


# ---- modes -------------------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """Linear, BatchNorm in evaluation mode from the start, dropout, and BatchNorm that is trained."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.linear, self.frozen, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.how = how
        with torch.no_grad():
            self.frozen.running_mean.fill_(0.5)  # type: ignore[union-attr]
            self.frozen.running_var.fill_(2.0)  # type: ignore[union-attr]
        if how == "flag":
            self.frozen.eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        if self.how == "override":
            self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.frozen(self.linear(x).flatten(0, 1)).tanh()).view(x.shape)


def frozen(how: str = "flag", width: int = 8, classes: int = 5) -> Layers:
    """`how`: flag (left in evaluation by its maker), override (by its own `train()`), whole (the second layer is)."""
    return [
        ("a", lambda: Frozen(width, how)),
        ("b", lambda: Frozen(width, how).eval() if how == "whole" else Block(width, width, 0.0)),
        ("head", lambda: nn.Linear(width, classes)),
    ]


# ---- losses ------------------------------------------------------------------------------------------------------


class Turn(nn.Module):
    """[N, T, C] -> [N, C, T], as torch's classifications want it; or [T, N, C]; or the same."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.to_dims = {"classes": (0, 2, 1), "time": (1, 0, 2), "same": (0, 1, 2)}[to]

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.to_dims)


def turned(to: str = "classes", width: int = 8, classes: int = 5) -> Layers:
    return [
        ("a", lambda: Block(width, width, 0.0)),
        ("b", lambda: Block(width, width, 0.0)),
        ("head", lambda: nn.Linear(width, classes)),
        ("turn", lambda: Turn(to)),
    ]


class Bits(Tokens):
    """Three yes-or-no targets for each of five classes."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], (self.x[index][:, :5] > 0.3).double()


class Scored(Tokens):
    """Targets of which none is -100."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index].clamp(min=0)


class Spoken(Tokens):
    """Twelve frames, and up to four symbols that they spell."""

    def __init__(self, samples: int = 64) -> None:
        super().__init__(samples, targets=12)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        symbols = self.y[index][:4].abs() % 5 + 1
        return self.x[index], {
            "symbols": symbols,
            "frames": torch.tensor(12 - index % 3),
            "length": torch.tensor(index % 3 + 2),
        }


def spelt(output: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Connectionist temporal classification of [T, N, C]: the sum of what torch takes the mean of, and N."""
    each = ctc(output, target, "none") / target["length"]
    return each.sum(), len(each)


def ctc(output: Tensor, target: dict[str, Tensor], reduction: str) -> Tensor:
    said = output.log_softmax(-1)
    return nn.functional.ctc_loss(said, target["symbols"], target["frames"], target["length"], reduction=reduction)


class Centred(nn.Module):
    """Cross entropy of what is left above a running centre, which training moves; (sum, count)."""

    def __init__(self, own_count: bool = False) -> None:
        super().__init__()
        self.centre = nn.Buffer(torch.zeros(5, dtype=torch.float64))
        self.calls = 0
        if own_count:
            self.count = lambda target: int((target != -100).sum())

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        given = (output - self.centre).flatten(0, 1)
        total = nn.functional.cross_entropy(given, target.flatten(), reduction="sum") * (1 + 0.01 * self.calls)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * output.detach().mean((0, 1))
            self.calls += 1
        return total, int((target != -100).sum())


class Keeping(nn.Module):
    """Holds on to the graph of its last output."""

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        self.last = output * 1
        return output.sum(), len(target)


def keeping() -> nn.Module:
    made = Keeping()
    made.last = torch.ones(2, requires_grad=True) * 1
    return made


def sampled(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Each scored target against three classes that are drawn for each position."""
    drawn = torch.randint(output.shape[-1], (*output.shape[:-1], 3))
    kept = target != -100
    own = output.gather(-1, target.clamp(min=0)[..., None])
    margins = torch.nn.functional.softplus(output.gather(-1, drawn) - own).sum(-1)
    return (margins * kept).sum(), int(kept.sum()) + int(torch.randint(2, ()))


def contrast(output: Tensor, target: Tensor) -> Tensor:
    """InfoNCE: every sample against all others of its batch."""
    each = nn.functional.normalize(output.flatten(1), dim=-1)
    return nn.functional.cross_entropy(each @ each.roll(1, -1).t() / 0.1, torch.arange(len(each)))


def standardized(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Compares with what the batch as a whole gives."""
    each = (output - output.mean(0)).pow(2).flatten(1).sum(-1)
    return each.sum(), len(each)


def careless(output: Tensor, target: Tensor) -> Tensor:
    """One mean over the targets that are not ignored, counted as its samples."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Careful:
    """The same, and what the mean is over."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return careless(output, target)

    def count(self, target: Tensor) -> int:
        return int((target != -100).sum())


def regression(output: Tensor, target: Tensor) -> Tensor:
    """One mean over everything, of targets that are numbers of classes."""
    return (output - (target[..., None] + 100).sqrt()).pow(2).mean()


def batched(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The sum, and always a count of 1."""
    return regression(output, target) * len(target), 1


def doubling(output: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """One mean, weighed by a tensor from the configuration."""
    return scale.sum() * regression(output, target)


# ---- layers that change what they hold ---------------------------------------------------------------------------


class Quantizer(nn.Module):
    """Moves its codes and then measures distances to them; `how` it does that.

    "buffer", "data" and "attribute" change them in place and use them; "copy" uses a copy, "replaced" makes new ones,
    "weight" changes a parameter, "unused" uses only what it moved them by.
    """

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(width, width), how
        codes = torch.eye(width) + 0.1
        if how == "weight":
            self.codes: Tensor = nn.Parameter(codes)
        elif how == "attribute":
            self.codes = codes.double()
        else:
            self.codes = nn.Buffer(codes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.training:
            with torch.no_grad():
                target = x.detach().flatten(0, 1).mean(0).expand_as(self.codes)
                if self.how == "replaced":
                    self.codes = self.codes.lerp(target, 0.1)
                else:
                    (self.codes.data if self.how == "data" else self.codes).lerp_(target, 0.1)
        if self.how == "unused":
            return x.tanh()
        codes = self.codes.clone() if self.how == "copy" else self.codes
        return x + ((x[..., None, :] - codes) * codes).tanh().sum(-1)


def quantized(how: str, width: int = 8, classes: int = 5) -> Layers:
    return [
        ("first", lambda: Quantizer(width, how)),
        ("second", lambda: Quantizer(width, how)),
        ("third", lambda: Quantizer(width, how)),
        ("head", lambda: nn.Linear(width, classes)),
    ]


def bounded(width: int = 8, classes: int = 5) -> Layers:
    """An embedding whose rows are rescaled when they are looked up."""
    return [
        ("words", lambda: nn.Embedding(7, width, max_norm=0.5)),
        ("block", lambda: Block(width, width, 0.0)),
        ("head", lambda: nn.Linear(width, classes)),
    ]


def quantized_last(width: int = 8, classes: int = 5) -> Layers:
    return [
        ("block", lambda: Block(width, width, 0.0)),
        ("next", lambda: Block(width, width, 0.0)),
        ("codes", lambda: Quantizer(width, "buffer")),
        ("head", lambda: nn.Linear(width, classes)),
    ]


# ---- layers that are run again in their backward -----------------------------------------------------------------


class Hesitant(nn.Module):
    """Linear and dropout, and a moment before this in which other ranks' threads run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.ran = nn.Linear(width, width), 0

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        time.sleep(5e-4)
        y = nn.functional.dropout(self.linear(x).tanh(), 0.3)
        time.sleep(5e-4)
        return nn.functional.dropout(y, 0.3)


def hesitant(reentrant: bool, layers: int = 8, width: int = 8, classes: int = 5) -> Layers:
    again: Layers = [(f"again{i}", lambda: Again(Hesitant(width), reentrant)) for i in range(layers - 2)]
    return [("first", lambda: Block(width, width, 0.0)), *again, ("head", lambda: nn.Linear(width, classes))]


def synchronised(width: int = 8, classes: int = 5) -> Layers:
    """BatchNorm over all replicas."""
    return [
        ("a", lambda: nn.Linear(width, width)),
        ("norm", lambda: nn.Sequential(nn.Flatten(0, 1), nn.SyncBatchNorm(width), nn.Unflatten(0, (-1, 3)))),
        ("head", lambda: nn.Linear(width, classes)),
    ]
