from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn


class ResNet(nn.Module):
    """A residual network whose parameters have torchvision's names.

    So weights of its ``resnet18`` (``layers=[2,2,2,2]``), ``resnet34`` (``[3,4,6,3]``) and
    ``resnet50`` (``[3,4,6,3]`` with ``block="bottleneck"``) load with ``norm="batch"``. By default
    it normalises over groups of channels instead, so that its training does not depend on how a
    batch is split between devices (He et al., "Deep Residual Learning", CVPR 2016; Wu and He,
    "Group Normalization", ECCV 2018).

    Args:
        num_classes: width of the output.
        in_channels: channels of the images.
        layers: blocks of each of the four stages.
        block: ``"basic"`` has two 3x3 convolutions, ``"bottleneck"`` one between two of 1x1.
        norm: ``"group"`` or ``"batch"``.
        num_groups: of channels that are normalised together; fewer where there are fewer channels.
        width: channels of the first stage; each later one has twice as many.
        stem: ``"image"`` halves the resolution twice before the first stage, ``"small"``, for
            images below some 64 pixels, leaves it.
        channels_last: keep channels together in memory, which convolutions are faster with on most
            devices.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        layers: Sequence[int] = (2, 2, 2, 2),
        block: Literal["basic", "bottleneck"] = "basic",
        norm: Literal["group", "batch"] = "group",
        num_groups: int = 32,
        width: int = 64,
        stem: Literal["image", "small"] = "image",
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        for name, value, choices in (
            ("block", block, ("basic", "bottleneck")),
            ("norm", norm, ("group", "batch")),
            ("stem", stem, ("image", "small")),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value} must be one of {', '.join(choices)}.")
        if len(layers) != 4:
            raise ValueError(f"layers={list(layers)} must be four numbers of blocks.")
        # With fewer channels than 16, oneDNN writes past its memory in the shortcuts' backward pass
        # on a CPU (its issue #6035).
        is_last = channels_last and width >= 16
        # Not the format itself, which torch.save cannot pickle.
        self.is_channels_last = is_last
        self.norm, self.num_groups = norm, num_groups
        if stem == "image":
            self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = self._norm(width)
        self.relu = nn.ReLU()
        kind: type[Basic | Bottleneck] = Basic if block == "basic" else Bottleneck
        widths = [width * 2**i for i in range(4)]
        outputs = [kind.expansion * channels for channels in widths]
        self.layer1 = self._stage(kind, width, widths[0], layers[0], stride=1)
        self.layer2 = self._stage(kind, outputs[0], widths[1], layers[1], stride=2)
        self.layer3 = self._stage(kind, outputs[1], widths[2], layers[2], stride=2)
        self.layer4 = self._stage(kind, outputs[2], widths[3], layers[3], stride=2)
        self.fc = nn.Linear(outputs[3], num_classes)
        self.reset_parameters()
        # Its hints do not have the argument.
        self.to(memory_format=self.format)  # type: ignore[call-overload]

    def _stage(
        self,
        kind: "type[Basic | Bottleneck]",
        in_channels: int,
        channels: int,
        num_blocks: int,
        stride: int,
    ) -> nn.Sequential:
        """Blocks of one resolution; the first one comes to it."""
        blocks = [kind(in_channels, channels, stride, self._norm)]
        while len(blocks) < num_blocks:
            blocks.append(kind(channels * kind.expansion, channels, 1, self._norm))
        return nn.Sequential(*blocks)

    def _norm(self, num_channels: int) -> nn.Module:
        if self.norm == "batch":
            return nn.BatchNorm2d(num_channels)
        num_groups = min(self.num_groups, num_channels)
        while num_channels % num_groups:
            num_groups -= 1
        return nn.GroupNorm(num_groups, num_channels)

    def reset_parameters(self) -> None:
        """Draw the convolutions' weights; each block begins as its shortcut (Goyal et al. 2017)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (Basic, Bottleneck)):
                last: Any = module.bn2 if isinstance(module, Basic) else module.bn3
                nn.init.zeros_(last.weight)

    @property
    def format(self) -> torch.memory_format:
        """The order of images and weights in memory."""
        return torch.channels_last if self.is_channels_last else torch.contiguous_format

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (B, C, H, W) to logits of shape (B, num_classes)."""
        x = x.contiguous(memory_format=self.format)
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

    def __init__(
        self, in_channels: int, channels: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.relu = nn.ReLU()
        self.downsample = shortcut(in_channels, channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, channels, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        result: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return result


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, beside a shortcut; see ``Basic``."""

    expansion = 4

    def __init__(
        self, in_channels: int, channels: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = norm(out_channels)
        self.relu = nn.ReLU()
        self.downsample = shortcut(in_channels, out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, 4 * channels, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        result: Tensor = self.relu(out + (x if self.downsample is None else self.downsample(x)))
        return result


def shortcut(
    in_channels: int, out_channels: int, stride: int, norm: Callable[[int], nn.Module]
) -> nn.Sequential | None:
    """What brings a block's input to the shape of its output, where they differ."""
    if stride == 1 and in_channels == out_channels:
        return None
    convolution = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)
    return nn.Sequential(convolution, norm(out_channels))
