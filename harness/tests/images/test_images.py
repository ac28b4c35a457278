"""What reaches a network from class folders of images."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from harness import Batch, UserError
from harness.data.checksum import checksum
from harness.images.datamodule import MEAN, STD, Images
from harness.images.decoding import decode
from tests.images.made import CLASSES, data, picture, write_images


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "pets")


def with_precision(module: Images, dtype: torch.dtype = torch.float32) -> Images:
    plugin = SimpleNamespace(convert_input=lambda x: x.to(dtype) if x.is_floating_point() else x)
    module.trainer = SimpleNamespace(precision_plugin=plugin)
    return module


def names_of(module: Images, split: str) -> list[str]:
    return [module.source.files.names[i] for i in module.rows[split]]


def test_batches_are_bytes_with_labels_and_of_training_with_draws(pets: Path) -> None:
    module = data(pets)
    indices = Batch([5, 0, 3], epoch=2)
    images, labels, draws = module.dataset("train").__getitems__(indices)
    assert (images.shape, images.dtype) == ((3, 18, 18, 3), torch.uint8)
    assert (draws.shape, draws.dtype) == ((3, 8), torch.int32)
    for image, label, index in zip(images, labels, indices, strict=True):
        name = names_of(module, "train")[index]
        assert np.array_equal(image.numpy(), decode(pets / name, 18, 3))
        assert CLASSES[label] == name.partition("/")[0]
    for split in ("val", "test", "predict"):
        assert len(module.dataset(split).__getitems__([0, 1])) == 2
    assert len(data(pets, augment=False).dataset("train").__getitems__([0, 1])) == 2
    assert len(data(pets, augmentation="none").dataset("train").__getitems__([0, 1])) == 2


def test_draws_depend_on_seed_epoch_and_sample_alone(pets: Path) -> None:
    def draws(indices: list[int], epoch: int = 0, seed: int = 1) -> Tensor:
        found: Tensor = (
            data(pets, seed=seed).dataset("train").__getitems__(Batch(indices, epoch))[2]
        )
        return found

    whole = draws([0, 1, 2, 3])
    assert torch.equal(draws([3, 1]), whole[[3, 1]])
    assert (draws([0, 1, 2, 3], epoch=1) != whole).all()
    assert (draws([0, 1, 2, 3], seed=2) != whole).all()


def test_what_happens_to_a_sample_does_not_depend_on_its_batch(pets: Path) -> None:
    module = with_precision(data(pets), torch.float64)
    train = module.dataset("train")
    whole, labels = module.on_after_batch_transfer(train.__getitems__(Batch(list(range(20)))), 0)
    assert whole.shape == (20, 3, 16, 16)
    for i in (0, 7, 19):
        (alone,), label = module.on_after_batch_transfer(train.__getitems__(Batch([i])), 0)
        assert (alone - whole[i]).abs().max() < 1e-12
        assert label == labels[i]


def test_evaluation_sees_the_middle_normalised(pets: Path) -> None:
    module = with_precision(data(pets))
    images, labels = module.on_after_batch_transfer(module.dataset("test").__getitems__([0]), 0)
    expected = decode(pets / names_of(module, "test")[0], 18, 3)[1:17, 1:17] / 255
    expected = ((expected - MEAN) / STD).transpose(2, 0, 1)
    assert np.abs(images[0].numpy() - expected).max() < 1e-6
    assert images.is_contiguous()
    assert labels.tolist() == [0]


def test_without_the_cache_the_pixels_are_the_same(tmp_path: Path) -> None:
    pets = write_images(tmp_path / "pets")
    with_cache, without = data(pets), data(pets, cache=False)
    for split in ("train", "test"):
        indices = Batch([4, 0, 2], epoch=1)
        for one, other in zip(
            with_cache.dataset(split).__getitems__(indices),
            without.dataset(split).__getitems__(indices),
            strict=True,
        ):
            assert torch.equal(one, other)
    assert len(list(tmp_path.glob("cache/*/index.json"))) == 2
    assert len(list(tmp_path.glob("cache/*/pixels.uint8"))) == 1
    assert data(pets, num_workers=None).num_workers == 0
    assert data(pets, num_workers=None, cache=False).num_workers == "auto"


def test_split_holds_each_image_once_and_each_class(pets: Path) -> None:
    rows = data(pets).rows
    everything = np.concatenate(list(rows.values()))
    assert sorted(everything.tolist()) == list(range(36))
    again, other = data(pets).rows, data(pets, split_seed=1).rows
    assert all(np.array_equal(rows[split], again[split]) for split in rows)
    assert not np.array_equal(rows["test"], other["test"])
    module = data(pets)
    for split in rows:
        assert {name.partition("/")[0] for name in names_of(module, split)} == set(CLASSES)


def test_what_has_no_folder_is_drawn_from_train(tmp_path: Path) -> None:
    for splits, drawn in (
        (("train", "val", "test"), ()),
        (("train", "test"), ("val",)),
        (("train", "valid"), ("test",)),
        (("train",), ("val", "test")),
    ):
        root = tmp_path / "_".join(splits)
        for split in splits:
            write_images(root / split, num=10)
        module = data(root)
        for split in ("train", "val", "test"):
            tops = {name.partition("/")[0][:3] for name in names_of(module, split)}
            assert tops == {"tra" if split in drawn else split[:3]}
        assert sum(len(rows) for rows in module.rows.values()) == 30 * len(splits)
        assert len(module.rows["train"]) == 30 - 6 * len(drawn)


def test_class_with_too_few_images_is_refused_before_packing(tmp_path: Path) -> None:
    root = write_images(tmp_path / "pets", classes=("cat", "dog"))
    write_images(root, num=2, classes=("rare",))
    with pytest.raises(UserError, match=r"rare \(2\): each class needs 3"):
        _ = data(root).facts
    assert not (tmp_path / "cache").exists()


def test_other_pixels_in_files_of_the_same_size_are_another_data_set(tmp_path: Path) -> None:
    root = write_images(tmp_path / "pets", suffix=".bmp")
    shutil.copytree(root, tmp_path / "elsewhere")  # with other times

    def identities(root: Path) -> list[object]:
        return [checksum(data(root, cache=c).make_dataset("train")) for c in (True, False)]

    before = identities(root)
    assert None not in before
    assert identities(tmp_path / "elsewhere") == before
    for path in root.glob("cat/*.bmp"):
        size = path.stat().st_size
        with Image.open(path) as image:
            picture(99, *image.size).save(path)
        assert path.stat().st_size == size
    after = identities(root)
    assert after[0] != before[0]
    assert after[1] != before[1]


def test_folders_of_one_name_with_files_of_one_time_are_two(tmp_path: Path) -> None:
    """As archives and `cp -p` make them."""
    batches = []
    for folder in ("one", "two"):
        root = write_images(tmp_path / folder / "pets", suffix=".bmp")
        for i, path in enumerate(sorted(root.rglob("*.bmp"))):
            if folder == "two":
                with Image.open(path) as image:
                    picture(500 + i, *image.size).save(path)
            os.utime(path, (1_000_000_000, 1_000_000_000))
        module = data(root, cache_dir=str(tmp_path / "cache"))
        batches.append(module.make_dataset("train").__getitems__([0])[0])
    assert not torch.equal(*batches)


def test_labels_are_those_of_the_training(tmp_path: Path) -> None:
    """Whatever classes are there at a later test: one is missing, and the order is another."""
    root = write_images(tmp_path / "pets")
    facts = data(root).facts
    later = tmp_path / "later"
    for name in ("dog", "cat"):
        shutil.copytree(root / name, later / "test" / name)
    module = data(later)
    module.facts = facts
    labels = module.dataset("test").__getitems__(list(range(24)))[1]
    pairs = zip(names_of(module, "test"), labels.tolist(), strict=True)
    found = {name.split("/")[1]: label for name, label in pairs}
    assert found == {"cat": 1, "dog": 2}
    with pytest.raises(UserError, match="has folders of test, and none of train"):
        module.dataset("train")


def test_files_that_are_others_than_in_training_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_images(tmp_path / "pets")
    facts = data(root).facts
    for is_changed in (False, True):
        if is_changed:
            (root / "cat" / "003.jpg").unlink()
        module = data(root)
        module.facts = facts
        module.dataset("test")
        assert ("may be on images that were trained on" in caplog.text) == is_changed


def broken(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).write_bytes((root / name).read_bytes()[:200])
    return root


def test_unreadable_files_are_refused_or_skipped_and_named(tmp_path: Path, capsys, caplog) -> None:
    caplog.set_level("INFO")
    bad = [f"cat/{i:03d}.jpg" for i in range(7)]
    root = broken(write_images(tmp_path / "pets", num=20), *bad)
    for cache in (True, False):
        with pytest.raises(UserError) as error:
            _ = data(root, cache=cache).facts
        first, second = str(error.value).split("\n")
        assert first.startswith(f"7 of 60 files below data.root={root} cannot be read: cat/000.jpg")
        assert "data.unreadable=skip" in second
        module = data(root, cache=cache, unreadable="skip")
        assert module.facts["num_classes"] == 3
        said = capsys.readouterr().out
        assert "and are skipped: cat/000.jpg: " in said
        assert "and 2 more" in said
        assert all(name in caplog.text for name in bad)  # of all, in the log
        caplog.clear()
        used = [name for split in module.rows for name in names_of(module, split)]
        assert len(used) == 53
        assert not set(used) & set(bad)
        train = module.dataset("train")
        images = train.__getitems__(list(range(len(train))))[0]
        assert (images.flatten(1).float().std(dim=1) > 0).all()
    for path in root.rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="60 of 60 files"):
        _ = data(root, unreadable="skip").facts


def test_file_that_vanishes_in_the_middle_of_a_run_is_named(tmp_path: Path) -> None:
    train = data(write_images(tmp_path / "pets"), cache=False).dataset("train")
    shutil.rmtree(tmp_path / "pets" / "cat")
    with pytest.raises(UserError, match=r"cat/\d+.jpg could be read when the run began, and"):
        train.__getitems__(list(range(len(train))))


def test_start_tells_classes_splits_and_what_is_left_out(tmp_path: Path, capsys) -> None:
    root = write_images(tmp_path / "pets")
    (root / "cat" / "notes.txt").write_text("")
    _ = data(root).facts
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"data.root={root}: 36 images, 3 classes"
    assert lines[1:3] == ["  left out: 1 .txt", "  bird 12, cat 12, dog 12"]
    assert lines[-1] == "  train 22, val 7, test 7"


def test_setting_that_cannot_be_is_told(tmp_path: Path) -> None:
    for setting, value, message in (
        ("size", 0, "size=0 must be 1 or more"),
        ("packed_size", 10, "packed_size=10 must be at least data.size=16"),
        ("channels", 4, "channels=4 must be 1 for grey or 3"),
        ("mean", [0.5], "mean=.* must be 3 numbers"),
        ("std", [1.0, 0.0, 1.0], "mean=.* must be 3 numbers, as data.std, all above 0"),
        ("unreadable", "ignore", "unreadable=ignore must be refuse or skip"),
        ("augmentation", "mixup", "augmentation=mixup must be one of none, crop, standard"),
        ("crop_scale", [0.5, 2.0], r"crop_scale=\[0.5, 2.0\] must be shares"),
        ("color_jitter", 2, "color_jitter=2 must be from 0 to 1"),
    ):
        with pytest.raises(UserError, match=f"data.{message}"):
            data(tmp_path, **{setting: value})
