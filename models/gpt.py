"""A decoder-only transformer with pre-normalisation (GPT-2), and the loss of predicting the next token.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layers = list[tuple[str, Callable[[], nn.Module]]]

_SPREAD = 0.02  # GPT-2's standard deviation of initial weights


def _linear(inputs: int, outputs: int, spread: float = _SPREAD, bias: bool = True) -> nn.Linear:
    module = nn.Linear(inputs, outputs, bias)
    nn.init.normal_(module.weight, std=spread)
    if bias:
        nn.init.zeros_(module.bias)
    return module


def _dropout(p: float) -> nn.Module:
    """Return dropout, or the identity where p = 0: that draws no random numbers and need not be seeded."""
    return nn.Dropout(p) if p > 0 else nn.Identity()


class Embedding(nn.Module):
    """Token plus position. Integers [N, T] -> [N, T, width], T at most `context`."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=_SPREAD)
        self.dropout = _dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Integers [N, T] -> [N, T, width]; ValueError for floats, and for T above the context."""
        if tokens.is_floating_point():
            raise ValueError(f"samples of {tokens.dtype} are no tokens, which are integers: use data=text, or your own")
        length, context = tokens.shape[1], self.position.num_embeddings
        if length > context:
            raise ValueError(
                f"a sample of {length} tokens is longer than the model's context of {context}: "
                "set model.context and data.context to one value"
            )
        positions = torch.arange(length, device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class Attention(nn.Module):
    """Causal self-attention. [N, T, width] -> [N, T, width]."""

    def __init__(self, width: int, heads: int, dropout: float, spread: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.qkv = _linear(width, 3 * width)
        self.out = _linear(width, width, spread)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it: [N, T, width] -> [N, T, width]."""
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron of four times the width, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float, layers: int) -> None:
        super().__init__()
        spread = _SPREAD / (2 * layers) ** 0.5  # the sum of 2 * layers branches keeps its size
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, spread)
        self.mlp = nn.Sequential(_linear(width, 4 * width), nn.GELU("tanh"), _linear(4 * width, width, spread))
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width] -> [N, T, width]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TiedHead(nn.Linear):
    """A head whose matrix is the token embedding's, wherever that is: the engine reads it from `tied`."""

    tied: ClassVar[dict[str, str]] = {"weight": "embedding.token.weight"}  # own name -> name in the whole model

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)


def gpt(
    vocabulary: int = 256,
    context: int = 128,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.0,
    tied: bool = False,
) -> Layers:
    """Return the layers of a GPT: integers [N, T] -> logits [N, T, vocabulary], T at most `context`.

    `tied`: one matrix is the token embedding and the head. Raises ValueError for sizes below 1, and where `heads` does
    not divide `width`.
    """
    sizes = {"vocabulary": vocabulary, "context": context, "width": width, "heads": heads}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"model.{name}={size} must be at least 1")
    if layers < 0:
        raise ValueError(f"model.layers={layers} is negative")
    if width % heads:
        raise ValueError(f"model.width={width} is not a multiple of model.heads={heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"model.dropout={dropout} is not in [0, 1)")
    return [
        ("embedding", lambda: Embedding(vocabulary, context, width, dropout)),
        *((f"blocks.{i}", lambda: Block(width, heads, dropout, layers)) for i in range(layers)),
        ("norm", lambda: nn.LayerNorm(width)),
        ("head", lambda: TiedHead(width, vocabulary) if tied else _linear(width, vocabulary, bias=False)),
    ]


class NextTokenLoss:
    """Cross entropy of logits [N, T, V] and tokens [N, T], as (sum, number of targets that are not `ignore_index`)."""

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        """Return the sum of losses, and the number of targets that it is over."""
        total = F.cross_entropy(
            output.flatten(0, -2), target.flatten(), ignore_index=self.ignore_index, reduction="sum"
        )
        return total, self.count(target)

    def count(self, target: Tensor) -> int:
        """Return the number of targets that are not `ignore_index`."""
        return int((target != self.ignore_index).sum())
