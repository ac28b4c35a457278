"""Augment a batch of images on the device that trains, from random numbers that came with it.

What happens to a sample depends on its own random numbers alone, never on the rest of the batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

KINDS = ("none", "crop", "standard", "randaugment")
# Random numbers of a sample by what they decide; RandAugment takes two more for each operation.
CROP, FLIP, COLORS, NUM_FIXED = slice(0, 4), 4, slice(5, 8), 8
BITS = 31
# What magnitude 30 of RandAugment means (Cubuk et al., CVPR Workshops 2020).
SHEAR, SHIFT, DEGREES, STRENGTH, POSTERIZED = 0.3, 0.45, 30.0, 0.9, 4.0
MOST = 30
GEOMETRY = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
OPERATIONS = (
    *("identity", *GEOMETRY, "brightness", "color", "contrast", "sharpness", "posterize"),
    *("solarize", "autocontrast", "equalize"),
)


@dataclass(frozen=True)
class Augmentation:
    """What training images go through.

    Args:
        kind: ``"crop"`` draws a part of the image; ``"standard"`` changes its colours as well;
            ``"randaugment"`` draws operations of 14 instead.
        flip: whether half of the images are mirrored.
        crop_scale: least and largest share of the image's area that a crop keeps.
        color_jitter: most that brightness, contrast and saturation change by, as a share.
        num_ops: operations of RandAugment on an image.
        magnitude: of these operations, from 0 to 30.
    """

    kind: str = "standard"
    flip: bool = True
    crop_scale: tuple[float, float] = (0.35, 1.0)
    color_jitter: float = 0.2
    num_ops: int = 2
    magnitude: float = 9

    @property
    def num_draws(self) -> int:
        """Random numbers that a sample takes."""
        return NUM_FIXED + (2 * self.num_ops if self.kind == "randaugment" else 0)

    def __call__(self, images: Tensor, draws: Tensor, size: int) -> Tensor:
        """Augment images.

        Args:
            images: values in [0, 1], shape (B, C, H, W).
            draws: of ``as_integers``, shape (B, num_draws).
            size: of the squares to return.

        Returns:
            Shape (B, C, size, size).
        """
        numbers = draws.to(images.dtype) / 2**BITS  # (B, D) in [0, 1)
        # Of RandAugment: (num_ops, 2, B), else none.
        drawn = numbers[:, NUM_FIXED:].T.unflatten(0, (-1, 2))
        theta = self._geometry(drawn) @ self._crops(numbers)
        shape = [len(images), images.shape[1], size, size]
        # Crop, flip and RandAugment's geometry together: pixels are interpolated once.
        grid = F.affine_grid(theta[:, :2], shape, align_corners=False)  # (B, size, size, 2)
        images = F.grid_sample(
            images, grid, mode="bilinear", padding_mode="reflection", align_corners=False
        )
        if self.kind == "standard" and self.color_jitter:
            return self._jittered(images, numbers[:, COLORS])
        for which, sign in drawn:
            images = self._colors(images, which, sign)
        return images

    def _crops(self, numbers: Tensor) -> Tensor:
        """Affine maps from places in the result to places in the image, shape (B, 3, 3)."""
        area, ratio, x, y = numbers[:, CROP].unbind(dim=1)
        low, high = self.crop_scale
        area = low + (high - low) * area
        ratio = torch.exp((2 * ratio - 1) * math.log(4 / 3) / 2)  # square root of width by height
        width, height = (area.sqrt() * ratio).clamp(max=1), (area.sqrt() / ratio).clamp(max=1)
        flipped = torch.where(numbers[:, FLIP] < 0.5, -1.0, 1.0) if self.flip else 1.0
        # Places go from -1 to 1; the crop's centre is as far from 0 as its size allows.
        theta = torch.zeros(len(numbers), 3, 3, dtype=numbers.dtype, device=numbers.device)
        theta[:, 0, 0], theta[:, 0, 2] = width * flipped, (2 * x - 1) * (1 - width)
        theta[:, 1, 1], theta[:, 1, 2] = height, (2 * y - 1) * (1 - height)
        theta[:, 2, 2] = 1
        return theta

    def _geometry(self, drawn: Tensor) -> Tensor:
        """RandAugment's geometric operations as affine maps, shape (B, 3, 3).

        Args:
            drawn: two numbers for each operation, shape (num_ops, 2, B).
        """
        share = self.magnitude / MOST
        whole = torch.eye(3, dtype=drawn.dtype, device=drawn.device).repeat(drawn.shape[2], 1, 1)
        for which, sign in drawn:
            name, sign = _chosen(which), _signs(sign)

            def amount(of: str, most: float, name: Tensor = name, sign: Tensor = sign) -> Tensor:
                return torch.where(name == OPERATIONS.index(of), sign * most * share, 0.0)

            angle = amount("rotate", math.radians(DEGREES))
            theta = torch.zeros_like(whole)
            theta[:, 0, 0] = theta[:, 1, 1] = angle.cos()
            theta[:, 0, 1] = amount("shear_x", SHEAR) - angle.sin()
            theta[:, 1, 0] = amount("shear_y", SHEAR) + angle.sin()
            theta[:, 0, 2] = amount("translate_x", 2 * SHIFT)  # the image is 2 wide
            theta[:, 1, 2] = amount("translate_y", 2 * SHIFT)
            theta[:, 2, 2] = 1
            whole = whole @ theta
        return whole

    def _jittered(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Change brightness, contrast and saturation of each image, shape (B, C, H, W)."""
        factors = 1 + self.color_jitter * (2 * numbers - 1)  # (B, 3)
        for name, factor in zip(("brightness", "contrast", "color"), factors.T, strict=True):
            images = _operation(name)(images, factor)
        return images

    def _colors(self, images: Tensor, which: Tensor, sign: Tensor) -> Tensor:
        """Apply the operation that each image has drawn, where it is one of colours."""
        share, name = self.magnitude / MOST, _chosen(which)
        changes = 1 + STRENGTH * share * _signs(sign)  # (B,)
        images = images.clone()
        for i, operation in enumerate(OPERATIONS):
            if operation == "identity" or operation in GEOMETRY:
                continue
            rows = (name == i).nonzero().squeeze(1)
            if len(rows):
                images[rows] = _operation(operation, share)(images[rows], changes[rows])
        return images


def as_integers(draws: NDArray[np.float64]) -> Tensor:
    """Random numbers in [0, 1) as integers below 2^31, which no precision of a run rounds."""
    return torch.from_numpy((draws * 2.0**BITS).astype(np.int32))


def _chosen(which: Tensor) -> Tensor:
    return (which * len(OPERATIONS)).long()


def _signs(numbers: Tensor) -> Tensor:
    return torch.where(numbers < 0.5, -1.0, 1.0).to(numbers.dtype)


def _operation(name: str, share: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """An operation on images (B, C, H, W) with a factor for each, (B,); 1 changes nothing.

    Args:
        name: one of ``OPERATIONS``.
        share: of the largest magnitude, for those that take no factor.
    """
    from kornia import enhance  # takes half a second

    operations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "brightness": lambda x, f: enhance.adjust_brightness_accumulative(x, f),
        "contrast": lambda x, f: enhance.adjust_contrast_with_mean_subtraction(x, f),
        "color": lambda x, f: (
            enhance.adjust_saturation_with_gray_subtraction(x, f) if x.shape[1] == 3 else x
        ),
        "sharpness": lambda x, f: enhance.sharpness(x, f),
        "posterize": lambda x, _: enhance.posterize(x, 8 - round(POSTERIZED * share)),
        "solarize": lambda x, _: enhance.solarize(x, 1 - share),
        "autocontrast": lambda x, _: enhance.normalize_min_max(x),
        "equalize": lambda x, _: enhance.equalize(x),
    }
    return operations[name]
