"""A small U-Net: what each level sees on the way down is joined to what it makes on the way up.

Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015. An ordinary module: the
engine cuts it by following its forward, and hands the skips on through the stages in between.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Level(nn.Module):
    """Two convolutions with a normalisation each. [N, inputs, H, W] -> [N, outputs, H, W]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(1, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(1, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] -> [N, outputs, H, W]."""
        x = self.norm1(self.first(x)).relu()
        return self.norm2(self.second(x)).relu()


class UNet(nn.Module):
    """Images [N, channels, H, W] -> a score for each class and pixel, [N, classes, H, W].

    ValueError for fewer than one level, and for images that 2 ** (levels - 1) does not divide.
    """

    def __init__(self, channels: int = 1, classes: int = 2, width: int = 16, levels: int = 3) -> None:
        super().__init__()
        if levels < 1:
            raise ValueError(f"model.levels={levels} must be at least 1")
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(map(Level, [channels, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * wide, wide, 2, 2) for wide in reversed(widths[:-1]))
        self.join = nn.ModuleList(Level(2 * wide, wide) for wide in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] -> [N, classes, H, W]."""
        step = 2 ** (len(self.down) - 1)
        if x.shape[-1] % step or x.shape[-2] % step:
            raise ValueError(f"an image of {list(x.shape[-2:])} cannot be halved {len(self.down) - 1} times")
        skips = []
        for number, level in enumerate(self.down):
            if number:
                x = nn.functional.max_pool2d(x, 2)
            x = level(x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)
