"""One file to one square of pixels."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.images import decoding
from harness.images.decoding import ORIENTATION, UPRIGHT, decode, reason
from tests_harness.images.made import picture

EXACT: dict[str, Any] = {
    ".jpg": {"quality": 100, "subsampling": 0},
    ".webp": {"lossless": True},
}


def mean(path: Path, channels: int = 3) -> list[int]:
    return decode(path, 8, channels).mean(axis=(0, 1)).round().astype(int).tolist()


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (8, 8), (5, 9), (640, 480)])
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".bmp", ".gif"])
def test_shorter_side_is_scaled_and_the_middle_kept(
    size: tuple[int, int], suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"x{suffix}"
    image = Image.new("RGB", size, (250, 0, 0))  # margins that must not be seen
    short, left, top = min(size), (size[0] - min(size)) // 2, (size[1] - min(size)) // 2
    image.paste((0, 0, 250), (left, top, left + short, top + short))
    image.save(path, **EXACT.get(suffix, {}))
    found = decode(path, 8, 3)
    assert found.shape == (8, 8, 3)
    assert found.dtype == np.uint8
    assert found[1:-1, 1:-1, 2].min() > 200
    assert found[1:-1, 1:-1, 0].max() < 60


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_exif_rotation_is_applied(orientation: int, suffix: str, tmp_path: Path) -> None:
    """As Pillow would turn the whole image; mirrored ones too."""
    upright = picture(1, 32, 20)
    back = {5: 5, 6: 8, 7: 7, 8: 6}.get(orientation, orientation)  # the turn that undoes it
    turn = UPRIGHT.get(back)
    stored = upright if turn is None else upright.transpose(turn)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    stored.save(tmp_path / f"a{suffix}", exif=exif, **EXACT.get(suffix, {}))
    upright.save(tmp_path / "b.png")
    found, expected = (decode(tmp_path / name, 16, 3) for name in (f"a{suffix}", "b.png"))
    assert np.abs(found.astype(int) - expected).max() <= (6 if suffix == ".jpg" else 1)


def test_damaged_exif_costs_no_image(tmp_path: Path) -> None:
    picture(1, 20, 20).save(tmp_path / "x.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode(tmp_path / "x.jpg", 8, 3).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("RGB", (200, 100, 50), [200, 100, 50]),
        ("L", 90, [90, 90, 90]),
        ("1", 1, [255, 255, 255]),
        ("P", 7, None),
        ("RGBA", (200, 100, 50, 255), [200, 100, 50]),
        ("RGBA", (0, 0, 0, 0), [255, 255, 255]),  # nothing is to be seen
        ("LA", (0, 51), [204, 204, 204]),
        ("I;16", 51 * 257, [51, 51, 51]),  # not cut off at 255
    ],
)
def test_every_kind_of_pixel_becomes_grey_or_colour(
    mode: str, color: int, expected: list[int] | None, tmp_path: Path
) -> None:
    image = Image.new(mode, (12, 10), color)
    if mode == "P":
        image.putpalette([i for rgb in [(10 * k, 3 * k, k) for k in range(25)] for i in rgb])
        expected = [70, 21, 7]
    image.save(tmp_path / "x.png")
    assert expected is not None
    assert mean(tmp_path / "x.png") == expected
    (grey,) = mean(tmp_path / "x.png", channels=1)
    assert grey == pytest.approx(np.dot(expected, [0.299, 0.587, 0.114]), abs=1)


def test_cmyk_and_grey_jpegs_have_the_channels_asked_for(tmp_path: Path) -> None:
    for mode in ("CMYK", "L"):
        Image.new("RGB", (40, 40), (200, 100, 50)).convert(mode).save(tmp_path / f"{mode}.jpg")
        for channels in (1, 3):
            assert decode(tmp_path / f"{mode}.jpg", 8, channels).shape == (8, 8, channels)


def test_of_an_animation_the_first_picture_counts(tmp_path: Path) -> None:
    pictures = [Image.new("RGB", (10, 10), color) for color in ("red", "blue")]
    for name in ("x.gif", "x.webp"):
        pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:])
        red, _, blue = mean(tmp_path / name)
        assert red > 240
        assert blue < 15


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".gif", ".bmp"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.6, 0.95])
def test_truncated_file_is_found(suffix: str, share: float, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(Exception) as error:  # noqa: PT011  # Pillow has many kinds
        decode(path, 32, 3)
    said = reason(error.value)
    assert said
    assert str(tmp_path) not in said


@pytest.mark.parametrize("factor", [0.9, 0.4])  # Pillow warns of the first, and refuses the second
def test_decompression_bomb_is_refused_by_its_number_of_pixels(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("L", (100, 100)).save(tmp_path / "x.png")
    monkeypatch.setattr(decoding.Image, "MAX_IMAGE_PIXELS", int(10_000 * factor))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as error:  # noqa: PT011  # a warning and an error
            decode(tmp_path / "x.png", 8, 3)
    assert "decompression bomb" in reason(error.value)


@pytest.mark.parametrize(
    ("contents", "said"),
    [(b"<html>not found</html>", "no image that Pillow can read"), (None, "No such file")],
)
def test_reason_is_told_on_a_line(contents: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(OSError) as error:  # noqa: PT011
        decode(path, 8, 3)
    assert reason(error.value).startswith(said)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("mode", "color"), [("RGB", (10, 20, 30)), ("L", 10)])
def test_a_color_that_stands_for_nothing_is_white(
    mode: str, color: Any, channels: int, tmp_path: Path
) -> None:
    Image.new(mode, (8, 8), color).save(tmp_path / "a.png", transparency=color)
    assert (decode(tmp_path / "a.png", 4, channels) == 255).all()
