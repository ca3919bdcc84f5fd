"""An encoder-decoder transformer: the decoder's layers all look at what the encoder made.

Vaswani et al., "Attention Is All You Need", 2017. An ordinary module of torch's layers: the engine cuts it by following
its forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Translator(nn.Module):
    """Tokens `source` [N, S] and `target` [N, T], which it continues -> logits [N, T, vocabulary].

    Padding (token `padding`) in the source is not looked at. ValueError where `heads` does not divide `width`.
    """

    def __init__(
        self,
        vocabulary: int = 32,
        context: int = 32,
        layers: int = 2,
        width: int = 32,
        heads: int = 2,
        dropout: float = 0.0,
        padding: int = 0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"model.width={width} is not a multiple of model.heads={heads}")
        rest = heads, 4 * width, dropout
        self.padding = padding
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.source = nn.Embedding(vocabulary, width)
        self.target = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, *rest, batch_first=True) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, *rest, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """[N, S] and [N, T] -> [N, T, vocabulary]."""
        length = target.shape[1]
        ignored = source == self.padding
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        memory = self.source(source) + self.position[: source.shape[1]]
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=ignored)
        x = self.target(target) + self.position[:length]
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=later, memory_key_padding_mask=ignored)
        return self.head(x)
