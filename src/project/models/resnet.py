"""Residual networks, with the names of torchvision's parameters."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


def group_norm(num_channels: int) -> nn.GroupNorm:
    """Normalise 32 groups of channels, or as many as there are channels."""
    return nn.GroupNorm(min(32, num_channels), num_channels)


class ResNet(nn.Module):
    """A residual network (He et al., "Deep Residual Learning", CVPR 2016).

    Weights of torchvision's ``resnet18`` (``layers=[2,2,2,2]``), ``resnet34`` (``[3,4,6,3]``) and
    ``resnet50`` (``[3,4,6,3]`` with ``block="bottleneck"``) load with ``norm="batch"``. By default
    it normalises over groups of channels instead (Wu and He, "Group Normalization", ECCV 2018), so
    that its training does not depend on how a batch is split between devices.

    Args:
        num_classes: width of the output.
        in_channels: channels of the images.
        layers: blocks of each of the four stages.
        block: ``"basic"`` has two 3x3 convolutions, ``"bottleneck"`` one between two of 1x1.
        norm: ``"group"`` or ``"batch"``.
        width: channels of the first stage, a power of 2 or a multiple of 32; each later one has
            twice as many.
        stem: ``"image"`` halves the resolution twice before the first stage, ``"small"``, for
            images below some 64 pixels, leaves it.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        layers: Sequence[int] = (2, 2, 2, 2),
        block: Literal["basic", "bottleneck"] = "basic",
        norm: Literal["group", "batch"] = "group",
        width: int = 64,
        stem: Literal["image", "small"] = "image",
    ) -> None:
        super().__init__()
        for name, value, choices in (
            ("block", block, ("basic", "bottleneck")),
            ("norm", norm, ("group", "batch")),
            ("stem", stem, ("image", "small")),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value} must be one of {', '.join(choices)}.")
        kind: type[Basic | Bottleneck] = Basic if block == "basic" else Bottleneck
        make_norm: Norm = group_norm if norm == "group" else nn.BatchNorm2d
        kernel, stride = (7, 2) if stem == "image" else (3, 1)
        self.conv1 = nn.Conv2d(in_channels, width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = make_norm(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if stem == "image" else nn.Identity()
        stages, channels = list[nn.Module](), width
        for i, num_blocks in enumerate(layers):
            blocks = list[nn.Module]()
            for j in range(num_blocks):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(kind(channels, width * 2**i, stride, make_norm))
                channels = width * 2**i * kind.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, num_classes)
        self.reset_parameters()
        # With fewer channels than 16, oneDNN writes past its memory in the shortcuts' backward pass
        # on a CPU (its issue #6035).
        if width >= 16:  # channels together in memory, which convolutions are faster with
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def reset_parameters(self) -> None:
        """Draw the convolutions' weights; each block begins as its shortcut (Goyal et al. 2017)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (Basic, Bottleneck)):
                last: Any = module.bn2 if isinstance(module, Basic) else module.bn3
                nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (B, C, H, W) to logits of shape (B, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class Basic(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    Args:
        in_channels: channels that come in.
        channels: of each convolution.
        stride: 2 halves the resolution.
        norm: makes the normalisation of so many channels.
    """

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.relu = nn.ReLU()
        self.downsample = make_shortcut(in_channels, channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, channels, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        result: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return result


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, beside a shortcut; see ``Basic``."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = norm(out_channels)
        self.relu = nn.ReLU()
        self.downsample = make_shortcut(in_channels, out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, 4 * channels, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        result: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return result


def make_shortcut(
    in_channels: int, out_channels: int, stride: int, norm: Norm
) -> nn.Sequential | None:
    """Make what brings a block's input to the shape of its output, where they differ."""
    if stride == 1 and in_channels == out_channels:
        return None
    convolution = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
    return nn.Sequential(convolution, norm(out_channels))
