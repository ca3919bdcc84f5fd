"""Residual networks for pictures: He et al., "Deep Residual Learning for Image Recognition" (arXiv 1512.03385).

Layer names joined with parameter names are torchvision's state-dict keys (`layer3.0.downsample.0.weight`), so published
weights load. As there, a bottleneck strides in its 3x3 convolution ("ResNet v1.5"). `zero_residual` gives the last norm
of every block a scale of 0, so that the block starts as the identity: Goyal et al., "Accurate, Large Minibatch SGD"
(arXiv 1706.02677). Without it the loss of a short run first goes up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

Layers = list[tuple[str, Callable[[], nn.Module]]]


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias, padded to keep the picture's size, He-initialised for its outputs."""
    module = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return module


class _Residual(nn.Module):
    """x + branch(x), rectified; the shortcut is a strided 1x1 convolution where the shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(self.branch(x) + shortcut)


class Basic(_Residual):
    """Two 3x3 convolutions. [N, inputs, H, W] -> [N, width, H / stride, W / stride]."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, zero_residual: bool = False) -> None:
        super().__init__(inputs, width, stride)
        self.conv1, self.bn1 = _convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3), nn.BatchNorm2d(width)
        if zero_residual:
            nn.init.zeros_(self.bn2.weight)

    def branch(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] -> [N, width, H / stride, W / stride], before the shortcut is added."""
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))


class Bottleneck(_Residual):
    """1x1 down, 3x3, 1x1 up. [N, inputs, H, W] -> [N, 4 * width, H / stride, W / stride]."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, zero_residual: bool = False) -> None:
        outputs = self.expansion * width
        super().__init__(inputs, outputs, stride)
        self.conv1, self.bn1 = _convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _convolution(width, outputs, 1), nn.BatchNorm2d(outputs)
        if zero_residual:
            nn.init.zeros_(self.bn3.weight)

    def branch(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] -> [N, 4 * width, H / stride, W / stride], before the shortcut is added."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.bn3(self.conv3(x))


def _resnet(
    block: type[Basic | Bottleneck], depths: Sequence[int], classes: int, width: int, zero_residual: bool
) -> Layers:
    for name, size in (("classes", classes), ("width", width)):
        if size < 1:
            raise ValueError(f"model.{name}={size} must be at least 1")
    layers: Layers = [
        ("conv1", lambda: _convolution(3, width, 7, 2)),
        ("bn1", lambda: nn.BatchNorm2d(width)),
        ("relu", lambda: nn.ReLU(inplace=True)),
        ("maxpool", lambda: nn.MaxPool2d(3, 2, padding=1)),
    ]
    channels = width
    for group, depth in enumerate(depths):
        inner = width * 2**group
        for index in range(depth):
            stride = 2 if group > 0 and index == 0 else 1
            layers.append((f"layer{group + 1}.{index}", partial(block, channels, inner, stride, zero_residual)))
            channels = inner * block.expansion
    return [
        *layers,
        ("avgpool", lambda: nn.AdaptiveAvgPool2d(1)),
        ("flatten", lambda: nn.Flatten(1)),
        ("fc", lambda: nn.Linear(channels, classes)),
    ]


def resnet18(classes: int = 1000, width: int = 64, zero_residual: bool = False) -> Layers:
    """Return ResNet-18: [N, 3, H, W] -> [N, classes]. `width`: channels after the stem."""
    return _resnet(Basic, (2, 2, 2, 2), classes, width, zero_residual)


def resnet34(classes: int = 1000, width: int = 64, zero_residual: bool = False) -> Layers:
    """Return ResNet-34: [N, 3, H, W] -> [N, classes]. `width`: channels after the stem."""
    return _resnet(Basic, (3, 4, 6, 3), classes, width, zero_residual)


def resnet50(classes: int = 1000, width: int = 64, zero_residual: bool = False) -> Layers:
    """Return ResNet-50: [N, 3, H, W] -> [N, classes]. `width`: channels after the stem."""
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, width, zero_residual)


def resnet101(classes: int = 1000, width: int = 64, zero_residual: bool = False) -> Layers:
    """Return ResNet-101: [N, 3, H, W] -> [N, classes]. `width`: channels after the stem."""
    return _resnet(Bottleneck, (3, 4, 23, 3), classes, width, zero_residual)
