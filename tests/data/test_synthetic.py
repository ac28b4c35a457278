import torch

from harness import Batch
from project.data.synthetic import Synthetic


def images_of(data: Synthetic, split: str) -> set[bytes]:
    return {image.tobytes() for image in data.make_dataset(split).inputs}


def test_splits_do_not_mix_and_do_not_depend_on_the_seed_of_the_run() -> None:
    first, second = Synthetic(batch_size=16, seed=1), Synthetic(batch_size=16, seed=2)
    train, val, test = (images_of(first, split) for split in ("train", "val", "test"))
    assert not train & val
    assert not (train | val) & test
    assert images_of(second, "test") == test


def test_augmentation_depends_on_seed_epoch_and_sample_alone() -> None:
    data = Synthetic(batch_size=16, noise=0.1, seed=1)
    train = data.make_dataset("train")
    whole, _ = train.__getitems__(Batch(list(range(10)), epoch=3))
    some, _ = train.__getitems__(Batch([9, 7], epoch=3))
    assert torch.equal(whole[[9, 7]], some)
    later, _ = train.__getitems__(Batch(list(range(10)), epoch=4))
    assert not torch.equal(whole, later)
    assert 0 < (whole - torch.from_numpy(train.inputs[:10])).abs().max() <= 0.1


def test_evaluation_is_not_augmented_nor_training_without_augment() -> None:
    test = Synthetic(batch_size=16, noise=0.1).make_dataset("test")
    train = Synthetic(batch_size=16, noise=0.1, augment=False).make_dataset("train")
    for data in (test, train):
        assert torch.equal(data.__getitems__([0, 1])[0], torch.from_numpy(data.inputs[:2]))
