"""What training images go through, one operation at a time."""

import numpy as np
import torch
from torch import Tensor

from harness import uniform
from harness.images.augmentation import Augmentation, as_integers
from tests.images.made import picture

WHOLE = (1.0, 1.0)  # the share that a crop keeps: all of it


def images(num: int = 4, side: int = 24) -> Tensor:
    arrays = [np.asarray(picture(i, side, side, i % 3)) for i in range(num)]
    return torch.from_numpy(np.stack(arrays)).movedim(3, 1).double() / 255


def drawn(num: int = 4, **fixed: float) -> Tensor:
    draws = uniform(1, 0, list(range(num)), 8)
    draws[:, 1] = 0.5  # as wide as high
    for name, value in fixed.items():
        draws[:, int(name[1:])] = value
    return as_integers(draws)


def test_integers_keep_what_was_drawn() -> None:
    draws = uniform(1, 2, [0, 5], 8)
    assert np.abs(as_integers(draws).double().numpy() / 2**31 - draws).max() < 1e-9
    assert as_integers(np.array([1 - 2.0**-53])).item() == 2**31 - 1


def test_half_of_the_images_are_mirrored() -> None:
    augment = Augmentation("crop", crop_scale=WHOLE)
    many = images(1).expand(400, -1, -1, -1)
    found = augment(many, drawn(400), 24)
    is_flipped = (found - many.flip(3)).abs().amax(dim=(1, 2, 3)) < 1e-6
    is_same = (found - many).abs().amax(dim=(1, 2, 3)) < 1e-6
    assert (is_flipped ^ is_same).all()
    assert 150 < is_flipped.sum() < 250


def test_crops_lie_in_the_image_and_keep_the_share_that_is_drawn() -> None:
    """An image of its own coordinates tells where a crop was taken from."""
    side = 64
    places = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    y, x = torch.meshgrid(places, places, indexing="ij")
    many = torch.stack([x, y, 0 * x]).expand(500, -1, -1, -1)
    found = Augmentation("crop", flip=False, crop_scale=(0.2, 0.6))(
        many, as_integers(uniform(1, 0, list(range(500)), 8)), side
    )
    inner = found[:, :2, 1:-1, 1:-1]
    width, height = ((inner[:, i].amax((1, 2)) - inner[:, i].amin((1, 2))) for i in (0, 1))
    width, height = width * side / (side - 3), height * side / (side - 3)
    assert 0.19 < (width * height).min() < 0.23
    assert 0.55 < (width * height).max() < 0.62
    assert 0.74 < (width / height).min() < 0.8
    assert 1.25 < (width / height).max() < 1.35
    assert found[:, :2].min() > 0
    assert found[:, :2].max() < 1
    assert inner[:, 0].amin() < 0.05  # up to every edge
    assert inner[:, 0].amax() > 0.95


def test_colours_change_as_much_as_is_asked() -> None:
    plain = Augmentation("standard", flip=False, crop_scale=WHOLE, color_jitter=0.0)
    assert torch.allclose(plain(images(), drawn(), 24), images(), atol=1e-6)
    jittered = Augmentation("standard", flip=False, crop_scale=WHOLE, color_jitter=0.3)
    darker = drawn(d5=0.0, d6=0.5, d7=0.5)  # brightness alone
    assert torch.allclose(jittered(images(), darker, 24), 0.7 * images(), atol=1e-6)
    flat = jittered(images(), drawn(d5=0.5, d6=0.0, d7=0.5), 24)  # contrast alone
    assert flat.std() < 0.85 * images().std()
    assert torch.allclose(flat.mean((0, 2, 3)).mean(), images().mean(), atol=0.05)
    pale = jittered(images(), drawn(d5=0.5, d6=0.5, d7=0.0), 24)  # saturation alone
    assert torch.allclose(pale.std(dim=1), 0.7 * images().std(dim=1), atol=1e-6)
    changes = (jittered(images(), drawn(), 24) - images()).abs().amax(dim=(1, 2, 3))
    assert len(set(changes.tolist())) == 4
