from pathlib import Path

import pytest
import torch

from harness import Batch, train
from project.data.synthetic import Synthetic, add_noise


@pytest.fixture
def data() -> Synthetic:
    return Synthetic(batch_size=16, noise=0.1, seed=1)


def images_of(data: Synthetic, split: str) -> set[bytes]:
    return {image.numpy().tobytes() for image in data.make_dataset(split).inputs}


def test_splits_do_not_mix(data: Synthetic) -> None:
    train, val, test = (images_of(data, split) for split in ("train", "val", "test"))
    assert not train & val
    assert not train & test
    assert not val & test


def test_splits_do_not_depend_on_the_seed_of_the_run() -> None:
    first = Synthetic(batch_size=16, seed=1)
    second = Synthetic(batch_size=16, seed=2)
    assert images_of(first, "test") == images_of(second, "test")


def test_augmentation_depends_on_seed_epoch_and_sample_alone(data: Synthetic) -> None:
    train = data.make_dataset("train")
    whole, _ = train.__getitems__(Batch(list(range(10)), epoch=3))
    some, _ = train.__getitems__(Batch([9, 7], epoch=3))
    assert torch.equal(whole[[9, 7]], some)
    later, _ = train.__getitems__(Batch(list(range(10)), epoch=4))
    assert not torch.equal(whole, later)


def test_evaluation_is_not_augmented(data: Synthetic) -> None:
    test = data.make_dataset("test")
    assert torch.equal(test.__getitems__([0, 1])[0], test.inputs[:2])


def test_augmentation_can_be_switched_off() -> None:
    train = Synthetic(batch_size=16, noise=0.1, augment=False).make_dataset("train")
    assert torch.equal(train.__getitems__([0, 1])[0], train.inputs[:2])


def test_noise_stays_within_its_bound() -> None:
    images = torch.full((4, 1, 3, 3), 0.5)
    noisy = add_noise(images, torch.rand(4, 9), noise=0.1)
    assert 0 < (noisy - images).abs().max() <= 0.1


def test_synthetic_trains(tmp_path: Path) -> None:
    """One epoch through the configs, with the test after it."""
    words = ("strategy=cpu", "trainer.max_epochs=1", "trainer.enable_progress_bar=false")
    run = train("data=synthetic", "model=mlp", *words, f"output_dir={tmp_path}")
    assert 0 <= run.results["test/accuracy"] <= 1
