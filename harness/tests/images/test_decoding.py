"""One file to one square of pixels."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.images import decoding
from harness.images.decoding import ORIENTATION, UPRIGHT, decode, reason
from tests.images.made import picture

EXACT: dict[str, Any] = {
    ".jpg": {"quality": 100, "subsampling": 0},
    ".webp": {"lossless": True},
}


def mean(path: Path, channels: int = 3) -> list[int]:
    return decode(path, 8, channels).mean(axis=(0, 1)).round().astype(int).tolist()


def test_shorter_side_is_scaled_and_the_middle_kept(tmp_path: Path) -> None:
    for suffix in (".jpg", ".png", ".webp", ".bmp", ".gif"):
        for size in ((40, 30), (30, 40), (8, 8), (5, 9), (640, 480)):
            path = tmp_path / f"x{suffix}"
            image = Image.new("RGB", size, (250, 0, 0))  # margins that must not be seen
            short, left, top = min(size), (size[0] - min(size)) // 2, (size[1] - min(size)) // 2
            image.paste((0, 0, 250), (left, top, left + short, top + short))
            image.save(path, **EXACT.get(suffix, {}))
            found = decode(path, 8, 3)
            assert (found.shape, found.dtype) == ((8, 8, 3), np.uint8)
            assert found[1:-1, 1:-1, 2].min() > 200, (suffix, size)
            assert found[1:-1, 1:-1, 0].max() < 60, (suffix, size)


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    """As Pillow would turn the whole image; mirrored ones too."""
    upright = picture(1, 32, 20)
    upright.save(tmp_path / "b.png")
    expected = decode(tmp_path / "b.png", 16, 3)
    for suffix in (".jpg", ".png", ".webp"):
        for orientation in range(1, 9):
            back = {6: 8, 8: 6}.get(orientation, orientation)  # the turn that undoes it
            turn = UPRIGHT.get(back)
            stored = upright if turn is None else upright.transpose(turn)
            exif = Image.Exif()
            exif[ORIENTATION] = orientation
            stored.save(tmp_path / f"a{suffix}", exif=exif, **EXACT.get(suffix, {}))
            difference = np.abs(decode(tmp_path / f"a{suffix}", 16, 3).astype(int) - expected)
            assert difference.max() <= (6 if suffix == ".jpg" else 1), (suffix, orientation)


def test_every_kind_of_pixel_becomes_grey_or_colour(tmp_path: Path) -> None:
    for mode, color, expected in (
        ("RGB", (200, 100, 50), [200, 100, 50]),
        ("L", 90, [90, 90, 90]),
        ("1", 1, [255, 255, 255]),
        ("P", 7, [70, 21, 7]),
        ("RGBA", (200, 100, 50, 255), [200, 100, 50]),
        ("RGBA", (0, 0, 0, 0), [255, 255, 255]),  # nothing is to be seen
        ("LA", (0, 51), [204, 204, 204]),
        ("I;16", 51 * 257, [51, 51, 51]),  # not cut off at 255
    ):
        image = Image.new(mode, (12, 10), color)
        if mode == "P":
            image.putpalette([i for rgb in [(10 * k, 3 * k, k) for k in range(25)] for i in rgb])
        image.save(tmp_path / "x.png")
        assert mean(tmp_path / "x.png") == expected, mode
        (grey,) = mean(tmp_path / "x.png", channels=1)
        assert grey == pytest.approx(np.dot(expected, [0.299, 0.587, 0.114]), abs=1), mode
    for mode in ("CMYK", "L"):
        Image.new("RGB", (40, 40), (200, 100, 50)).convert(mode).save(tmp_path / "x.jpg")
        for channels in (1, 3):
            assert decode(tmp_path / "x.jpg", 8, channels).shape == (8, 8, channels)
    for mode, color in (("RGB", (10, 20, 30)), ("L", 10)):  # a colour that stands for nothing
        Image.new(mode, (8, 8), color).save(tmp_path / "a.png", transparency=color)
        for channels in (1, 3):
            assert (decode(tmp_path / "a.png", 4, channels) == 255).all()


def said_of(path: Path) -> str:
    with pytest.raises(Exception) as error, warnings.catch_warnings():  # noqa: PT011, PT012  # Pillow has many kinds
        warnings.simplefilter("ignore")
        decode(path, 32, 3)
    return reason(error.value)


def test_what_cannot_be_decoded_has_a_reason_on_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    for suffix in (".jpg", ".png", ".webp", ".gif", ".bmp"):
        path = tmp_path / f"x{suffix}"
        image.save(path)
        whole = path.read_bytes()
        for share in (0.0, 0.05, 0.6, 0.95):
            path.write_bytes(whole[: int(share * len(whole))])
            said = said_of(path)
            assert said
            assert str(tmp_path) not in said
    (tmp_path / "x.jpg").write_bytes(b"<html>not found</html>")
    assert said_of(tmp_path / "x.jpg") == "no image that Pillow can read"
    assert said_of(tmp_path / "none.jpg").startswith("No such file")
    Image.new("L", (100, 100)).save(tmp_path / "x.png")
    for factor in (0.9, 0.4):  # Pillow warns of the first, and refuses the second
        monkeypatch.setattr(decoding.Image, "MAX_IMAGE_PIXELS", int(10_000 * factor))
        assert "decompression bomb" in said_of(tmp_path / "x.png")
