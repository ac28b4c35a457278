"""A small convolutional network."""

from collections.abc import Sequence

from torch import Tensor, nn


class CNN(nn.Module):
    """A small convolutional network: 3x3 convolutions, each level at half the resolution.

    It normalises over 8 groups of channels (Wu and He, "Group Normalization", ECCV 2018) instead of
    the batch. Training then does not depend on how devices split a batch.

    Args:
        in_channels: channels of the images.
        channels: width of each level; each must be a multiple of 8.
        num_classes: width of the output.
    """

    def __init__(self, in_channels: int, channels: Sequence[int], num_classes: int) -> None:
        super().__init__()
        levels: list[nn.Module] = []
        for i, width in enumerate(channels):
            levels += [
                nn.Conv2d(in_channels, width, 3, stride=1 if i == 0 else 2, padding=1, bias=False),
                nn.GroupNorm(8, width),
                nn.GELU(),
            ]
            in_channels = width
        self.levels = nn.Sequential(*levels)
        self.head = nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (B, C, H, W) to logits of shape (B, num_classes)."""
        features = self.levels(x).mean(dim=(2, 3))  # (B, channels[-1])
        logits: Tensor = self.head(features)
        return logits
