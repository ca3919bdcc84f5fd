"""A language model of stacked LSTMs, each added to its input.

An ordinary module: the engine cuts it by following its forward.
"""

from __future__ import annotations

from torch import Tensor, nn


class LSTM(nn.Module):
    """Tokens [N, T] -> logits [N, T, vocabulary]. ValueError for fewer than one layer."""

    def __init__(self, vocabulary: int = 256, layers: int = 3, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"model.layers={layers} must be at least 1")
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, T] -> [N, T, vocabulary]. Each layer goes on from the state that the layer before it ended in."""
        x, state = self.embedding(tokens), None
        for layer in self.layers:
            out, state = layer(x, state)
            x = x + self.dropout(out)
        return self.head(x)
