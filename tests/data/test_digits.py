import numpy as np
import pytest
import torch

from harness import Batch
from project.data.digits import Digits, shift


@pytest.fixture
def digits() -> Digits:
    return Digits(batch_size=64, max_shift=1, seed=1)


def images_of(digits: Digits, split: str) -> set[bytes]:
    return {image.numpy().tobytes() for image in digits.make_dataset(split).inputs}


def test_splits_do_not_mix_and_lose_nothing(digits: Digits) -> None:
    splits = digits.split_indices(np.repeat(np.arange(10), 100))
    joined = np.concatenate(list(splits.values()))
    assert sorted(joined) == list(range(1000))
    assert not images_of(digits, "train") & images_of(digits, "test")


def test_splits_are_stratified(digits: Digits) -> None:
    for split, share in (("train", 0.7), ("val", 0.1), ("test", 0.2)):
        counts = torch.bincount(digits.make_dataset(split).targets, minlength=10)
        assert abs(counts.sum() - share * 1797) <= 1
        # The classes of the whole set differ by up to 9 in 180.
        assert counts.max() - counts.min() <= 1 + share * 9


def test_splits_do_not_depend_on_the_seed_of_the_run() -> None:
    first, second = Digits(batch_size=64, seed=1), Digits(batch_size=64, seed=2)
    assert torch.equal(first.make_dataset("test").inputs, second.make_dataset("test").inputs)


def test_augmentation_depends_on_seed_epoch_and_sample_alone(digits: Digits) -> None:
    train = digits.make_dataset("train")
    whole, _ = train.__getitems__(Batch(list(range(50)), epoch=3))
    some, _ = train.__getitems__(Batch([49, 7], epoch=3))
    assert torch.equal(whole[[49, 7]], some)
    later, _ = train.__getitems__(Batch(list(range(50)), epoch=4))
    assert not torch.equal(whole, later)


def test_prediction_reads_the_test_images(digits: Digits) -> None:
    assert images_of(digits, "predict") == images_of(digits, "test")


def test_evaluation_is_not_augmented(digits: Digits) -> None:
    test = digits.make_dataset("test")
    images, _ = test.__getitems__([0, 1])
    assert torch.equal(images, test.inputs[:2])


def test_shift_moves_by_whole_pixels() -> None:
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    still = torch.tensor([[0.5, 0.5]])
    assert torch.equal(shift(image, still, 1), image)
    up_left = shift(image, torch.tensor([[0.99, 0.99]]), 1)
    assert torch.equal(up_left[0, 0], torch.tensor([[4.0, 5, 0], [7, 8, 0], [0, 0, 0]]))
