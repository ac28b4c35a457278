"""Augment a batch of images on the device that trains, from random numbers that came with it.

What happens to a sample depends on its own random numbers alone, never on the rest of the batch.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

KINDS = ("none", "crop", "standard")
# Random numbers of a sample by what they decide.
CROP, FLIP, COLORS, NUM_DRAWS = slice(0, 4), 4, slice(5, 8), 8
BITS = 31


@dataclass(frozen=True)
class Augmentation:
    """What training images go through.

    Args:
        kind: ``"crop"`` draws a part of the image; ``"standard"`` changes its colours as well.
        flip: whether half of the images are mirrored.
        crop_scale: least and largest share of the image's area that a crop keeps.
        color_jitter: most that brightness, contrast and saturation change by, as a share.
    """

    kind: str = "standard"
    flip: bool = True
    crop_scale: tuple[float, float] = (0.35, 1.0)
    color_jitter: float = 0.2

    def __call__(self, images: Tensor, draws: Tensor, size: int) -> Tensor:
        """Augment images.

        Args:
            images: values in [0, 1], shape (B, C, H, W).
            draws: of ``as_integers``, shape (B, NUM_DRAWS).
            size: of the squares to return.

        Returns:
            Shape (B, C, size, size).
        """
        numbers = draws.to(images.dtype) / 2**BITS  # (B, D) in [0, 1)
        theta = self._crops(numbers)
        shape = [len(images), images.shape[1], size, size]
        # Crop and flip together: pixels are interpolated once.
        grid = F.affine_grid(theta, shape, align_corners=False)  # (B, size, size, 2)
        images = F.grid_sample(
            images, grid, mode="bilinear", padding_mode="reflection", align_corners=False
        )
        if self.kind == "standard" and self.color_jitter:
            return self._jittered(images, numbers[:, COLORS])
        return images

    def _crops(self, numbers: Tensor) -> Tensor:
        """Affine maps from places in the result to places in the image, shape (B, 2, 3)."""
        area, ratio, x, y = numbers[:, CROP].unbind(dim=1)
        low, high = self.crop_scale
        area = low + (high - low) * area
        ratio = torch.exp((2 * ratio - 1) * math.log(4 / 3) / 2)  # square root of width by height
        width, height = (area.sqrt() * ratio).clamp(max=1), (area.sqrt() / ratio).clamp(max=1)
        flipped = torch.where(numbers[:, FLIP] < 0.5, -1.0, 1.0) if self.flip else 1.0
        # Places go from -1 to 1; the crop's centre is as far from 0 as its size allows.
        theta = torch.zeros(len(numbers), 2, 3, dtype=numbers.dtype, device=numbers.device)
        theta[:, 0, 0], theta[:, 0, 2] = width * flipped, (2 * x - 1) * (1 - width)
        theta[:, 1, 1], theta[:, 1, 2] = height, (2 * y - 1) * (1 - height)
        return theta

    def _jittered(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Change brightness, contrast and saturation of each image, shape (B, C, H, W)."""
        factors = 1 + self.color_jitter * (2 * numbers - 1)  # (B, 3)
        brightness, contrast, saturation = factors.T
        images = _mixed(images, images.new_zeros(1), brightness)
        images = _mixed(images, _grey(images).mean(dim=(2, 3), keepdim=True), contrast)
        return _mixed(images, _grey(images), saturation)


def as_integers(draws: NDArray[np.float64]) -> Tensor:
    """Random numbers in [0, 1) as integers below 2^31, which no precision of a run rounds."""
    return torch.from_numpy((draws * 2.0**BITS).astype(np.int32))


def _mixed(images: Tensor, others: Tensor, factors: Tensor) -> Tensor:
    """Move images (B, C, H, W) away from others where their factor, of (B,), is above 1."""
    factors = factors[:, None, None, None]
    return (factors * images + (1 - factors) * others).clamp(0, 1)


def _grey(images: Tensor) -> Tensor:
    """Images (B, C, H, W) without their colours, shape (B, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(dim=1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)
