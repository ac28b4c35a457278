"""Residual networks, with the names of torchvision's parameters."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


def group_norm(num_channels: int) -> nn.GroupNorm:
    """Normalise over 32 groups of channels, or over each channel if there are fewer."""
    return nn.GroupNorm(min(32, num_channels), num_channels)


class ResNet(nn.Module):
    """A residual network (He et al., "Deep Residual Learning", CVPR 2016).

    Weights of torchvision's ``resnet18`` (``layers=[2,2,2,2]``), ``resnet34`` (``[3,4,6,3]``) and
    ``resnet50`` (``[3,4,6,3]`` with ``block="bottleneck"``) load with ``norm="batch"``. By default
    the network normalises over groups of channels (Wu and He, "Group Normalization", ECCV 2018).
    Training then does not depend on how devices split a batch.

    Args:
        num_classes: width of the output.
        in_channels: channels of the images.
        layers: blocks of each of the four stages.
        block: ``"basic"``: two 3x3 convolutions; ``"bottleneck"``: 1x1, 3x3 and 1x1.
        norm: ``"group"`` or ``"batch"``.
        width: channels of the first stage, a power of 2 or a multiple of 32. Each later stage has
            twice as many as the stage before.
        stem: ``"image"`` halves the resolution twice before the first stage. ``"small"`` keeps the
            resolution, for images below about 64 pixels.
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
        make_norm: Norm = group_norm if norm == "group" else nn.BatchNorm2d
        kernel, stride = (7, 2) if stem == "image" else (3, 1)
        self.conv1 = nn.Conv2d(in_channels, width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = make_norm(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if stem == "image" else nn.Identity()
        stages, channels, is_bottleneck = list[nn.Module](), width, block == "bottleneck"
        for i, num_blocks in enumerate(layers):
            blocks = list[Block]()
            for j in range(num_blocks):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(Block(channels, width * 2**i, stride, make_norm, is_bottleneck))
                channels = blocks[-1].out_channels
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # Convolutions are faster with channels_last. Below 16 channels, oneDNN writes past its
        # memory in the shortcuts' backward pass on a CPU (its issue #6035).
        if width >= 16:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (B, C, H, W) to logits of shape (B, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class Block(nn.Module):
    """Convolutions beside a shortcut, whose output is initially 0 (Goyal et al. 2017).

    Args:
        in_channels: channels of the input.
        channels: channels of each convolution; a bottleneck's output has four times as many.
        stride: 2 halves the resolution.
        norm: called with the number of channels, returns a normalisation layer.
        is_bottleneck: whether the convolutions are 1x1, 3x3 and 1x1, and not 3x3 and 3x3.
    """

    def __init__(
        self, in_channels: int, channels: int, stride: int, norm: Norm, is_bottleneck: bool
    ) -> None:
        super().__init__()
        kernels = (1, 3, 1) if is_bottleneck else (3, 3)
        self.num_layers = len(kernels)
        self.out_channels = channels * (4 if is_bottleneck else 1)
        widths = [in_channels, *[channels] * (len(kernels) - 1), self.out_channels]
        for i, kernel in enumerate(kernels):
            step = stride if i == len(kernels) - 2 else 1  # the last but one convolution
            convolution = nn.Conv2d(widths[i], widths[i + 1], kernel, step, kernel // 2, bias=False)
            self.add_module(f"conv{i + 1}", convolution)
            self.add_module(f"bn{i + 1}", norm(widths[i + 1]))
        nn.init.zeros_(getattr(self, f"bn{len(kernels)}").weight)
        self.relu, self.downsample = nn.ReLU(), None
        if stride > 1 or in_channels != self.out_channels:
            shortcut = nn.Conv2d(in_channels, self.out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, norm(self.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride)."""
        out = x
        for i in range(1, self.num_layers + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
            out = self.relu(out) if i < self.num_layers else out
        result: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return result
