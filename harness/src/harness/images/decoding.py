"""One image file to one square of pixels, the same wherever it is decoded.

Imports Pillow and NumPy only: the processes that pack images start in a tenth of a second.
"""

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile

ORIENTATION = 0x0112  # the EXIF tag
# What turns an image upright, by the tag's value.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(path: str | Path, side: int, channels: int) -> NDArray[np.uint8]:
    """Read an image: its shorter side is scaled to ``side``, and the middle is kept.

    EXIF rotation is applied. Transparent images are laid on white; of an animation the first
    picture counts, of 16 bits the upper 8.

    Args:
        path: of any format that Pillow knows.
        side: of the square, in pixels.
        channels: 1 for grey, 3 for red, green and blue.

    Returns:
        Shape (side, side, channels).

    Raises:
        Exception: of many kinds, if the file is damaged or has more pixels than an image has.
    """
    mode = "L" if channels == 1 else "RGB"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged notes beside the pixels
        # A small file that would fill the memory: Pillow only warns up to twice its limit.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path) as file:
            image = _square(file, side, mode)
            turn = UPRIGHT.get(_orientation(file))
    image = image if turn is None else image.transpose(turn)
    image = image if image.mode == mode else image.convert(mode)
    return np.asarray(image).reshape(side, side, channels)


def _square(file: ImageFile, side: int, mode: str) -> Image.Image:
    """The middle of an image, as its file holds it."""
    width, height = file.size
    scale = side / min(width, height)
    # A JPEG is decoded at 1/2, 1/4 or 1/8 where that is still as large as what is asked for.
    file.draft(mode, (round(width * scale), round(height * scale)))
    file.load()
    image = _plain(file, mode)
    width, height = image.size
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    box = (left, top, left + short, top + short)
    return image.resize((side, side), Image.Resampling.BILINEAR, box)


def reason(error: Exception) -> str:
    """Why a file could not be decoded, on one line and without its path."""
    if isinstance(error, (Image.DecompressionBombWarning, Image.DecompressionBombError)):
        return f"more than {Image.MAX_IMAGE_PIXELS:,} pixels: it may be a decompression bomb"
    if isinstance(error, UnidentifiedImageError):
        return "no image that Pillow can read"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """An image as grey or RGB; a grey one stays grey, which is scaled in a third of the time."""
    if image.mode in ("L", mode) and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # Pillow would cut off what is above 255
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("LA", "PA", "La", "RGBa", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert(mode)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1, which is upright, where there is none that can be read."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF, which is no reason to lose the pixels
        return 1
