"""A multilayer perceptron for samples of a fixed number of values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

Layers = list[tuple[str, Callable[[], nn.Module]]]

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "silu": nn.SiLU}


class Hidden(nn.Module):
    """Linear, activation and, where dropout > 0, dropout. [N, inputs] -> [N, outputs]."""

    def __init__(self, inputs: int, outputs: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs] -> [N, outputs]."""
        return self.dropout(self.activation(self.linear(x)))


class Input(nn.Module):
    """Flatten samples: [N, ...] -> [N, features]; ValueError for another number of values."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """[N, ...] -> [N, features]."""
        flat = x.flatten(1)
        if flat.shape[1] != self.features:
            raise ValueError(
                f"samples of shape {list(x.shape[1:])} have {flat.shape[1]} values, model.features={self.features}: "
                f"set model.features={flat.shape[1]}"
            )
        return flat


def mlp(
    features: int = 64,
    hidden: int = 64,
    depth: int = 4,
    classes: int = 10,
    dropout: float = 0.0,
    activation: str = "relu",
) -> Layers:
    """Return the layers of a perceptron: [N, ...] -> [N, classes] through `depth` hidden layers of width `hidden`.

    A sample has `features` values in any shape. Raises ValueError for an unknown activation, a negative depth, an empty
    layer, or a dropout outside [0, 1).
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"model.activation={activation} is not one of {', '.join(ACTIVATIONS)}")
    if depth < 0:
        raise ValueError(f"model.depth={depth} is negative")
    for name, size in (("features", features), ("hidden", hidden), ("classes", classes)):
        if size < 1:
            raise ValueError(f"model.{name}={size} must be at least 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"model.dropout={dropout} is not in [0, 1)")
    widths = [features, *[hidden] * depth]
    return [
        ("input", lambda: Input(features)),
        *((f"hidden.{i}", partial(Hidden, widths[i], hidden, activation, dropout)) for i in range(depth)),
        ("head", lambda: nn.Linear(widths[-1], classes)),
    ]
