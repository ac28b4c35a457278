import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness import Batch, UserError, evaluate, predict, train
from project.data.image_files import decode, find_images
from project.data.images import NUM_DRAWS, Images, augment

CLASSES = ("bird", "cat", "dog")


def write_images(root: Path, num: int = 12, classes: tuple[str, ...] = CLASSES) -> Path:
    """Write smooth pictures of mixed sizes, whose colours tell their class."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(num):
            coarse = np.random.default_rng([label, i]).integers(0, 100, (3, 4, 3))
            coarse[..., label % 3] += 140
            picture = Image.fromarray(coarse.astype(np.uint8))
            picture.resize((20 + i % 7, 18 + i % 5)).save(root / name / f"{i:03}.png")
    return root


def data(root: Path, **settings: Any) -> Images:
    chosen: dict[str, Any] = {"size": 16, "batch_size": 7, "val_fraction": 0.2}
    chosen |= {"cache_dir": str(root.parent / "cache")}
    return Images(str(root), **chosen | settings)


def words(root: Path, folder: Path) -> list[str]:
    """The words of a run of seconds."""
    return [
        *("experiment=images", f"data.root={root}", f"data.cache_dir={root.parent / 'cache'}"),
        *("data.size=16", "data.batch_size=7", "data.val_fraction=0.2", "strategy=cpu"),
        *("model.net.layers=[1,1,1,1]", "model.net.width=8", "model.net.stem=small"),
        *("trainer.max_epochs=8", "trainer.enable_progress_bar=false", f"output_dir={folder}"),
    ]


def test_images_are_found_at_any_depth_and_hidden_files_and_folders_are_not(tmp_path: Path) -> None:
    for name in ("z.png", "b/c/A.JPG", "b/a.jpeg", ".hidden/a.png", "b/.a.png", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_images(tmp_path, "data.root") == ["b/a.jpeg", "b/c/A.JPG", "z.png"]


def test_images_train_are_evaluated_and_predicted(tmp_path: Path) -> None:
    root = write_images(tmp_path / "pets")
    run = train(*words(root, tmp_path / "out"))
    assert run.results["test/accuracy"] > 0.8  # the colour tells the class
    again = evaluate(run.checkpoint).results
    assert again["test/loss"] == pytest.approx(run.results["test/loss"], abs=1e-6)
    new = write_images(tmp_path / "new" / "deep", num=2)
    table = predict(
        run.checkpoint, f"data.predict_root={new.parent}", f"output={tmp_path / 'table.csv'}"
    )
    rows = table.read_text().splitlines()
    assert len(rows) == 7
    assert "deep/bird/000.png" in rows[1]
    (root / "cat" / "more.png").write_bytes((root / "cat" / "000.png").read_bytes())
    log = (evaluate(run.checkpoint).folder / "run.log").read_text()
    assert "may contain samples of the training" in log


def test_each_image_is_in_one_split_and_classes_are_in_proportion(tmp_path: Path) -> None:
    images = data(write_images(tmp_path / "pets", num=20))
    found = [images.make_dataset(split) for split in ("train", "val", "test")]
    assert sorted(np.concatenate([part.rows for part in found])) == list(range(60))
    assert [np.bincount(part.labels).tolist() for part in found] == [[13] * 3, [4] * 3, [3] * 3]


def test_folders_of_splits_are_taken_and_missing_ones_drawn(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    for split, num in (("train", 20), ("validation", 5)):
        write_images(root / split, num)
    found = data(root).found["rows"]
    assert {split: len(rows) for split, rows in found.items()} == {
        "train": 51,  # of 60, because 0.15 of them are the test split
        "val": 15,
        "test": 9,
    }
    write_images(root / "test", classes=("bird", "cat", "dgo"))
    with pytest.raises(
        UserError, match="images have the classes dgo, which the training images do"
    ):
        data(root).infer_facts()


def test_decoding_turns_scales_and_lays_on_white(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    left_white = np.zeros((40, 80), np.uint8)
    left_white[:, :40] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees: the left becomes the top
    Image.fromarray(left_white).save(path, exif=exif)
    turned = decode(path, 8)[..., 0]
    assert turned[:3].min() > 200
    assert turned[-3:].max() < 50
    Image.new("RGBA", (9, 9), (0, 0, 0, 0)).save(path)
    assert decode(path, 4).tolist() == [[[255] * 3] * 4] * 4
    Image.fromarray(np.full((5, 5), 40_000, np.uint16)).save(path)
    assert decode(path, 2).tolist() == [[[40_000 >> 8] * 3] * 2] * 2


def test_augmentation_depends_on_seed_epoch_and_sample_alone(tmp_path: Path) -> None:
    train_images = data(write_images(tmp_path / "pets"), seed=1).make_dataset("train")
    _, _, whole = train_images.__getitems__(Batch(list(range(10)), epoch=3))
    _, _, some = train_images.__getitems__(Batch([9, 7], epoch=3))
    assert torch.equal(whole[[9, 7]], some)
    assert not torch.equal(whole, train_images.__getitems__(Batch(list(range(10)), epoch=4))[2])


def test_augmentation_in_its_middle_is_the_image() -> None:
    images = torch.rand(2, 3, 8, 8)
    middle = torch.full((2, NUM_DRAWS), 0.5)
    settings: dict[str, Any] = {"scale": (1.0, 1.0), "jitter": 0.5}
    torch.testing.assert_close(augment(images, middle, 8, flip=False, **settings), images)
    mirrored = torch.full((2, NUM_DRAWS), 0.5)
    mirrored[:, 4] = 0.1
    torch.testing.assert_close(augment(images, mirrored, 8, flip=True, **settings), images.flip(3))


def test_images_are_decoded_once_and_pickled_without_pixels(tmp_path: Path) -> None:
    root = write_images(tmp_path / "pets")
    first = data(root).make_dataset("test")
    images, _ = first.__getitems__([0, 1])
    assert len(pickle.dumps(first)) < 10_000
    for file in root.glob("*/*.png"):  # another file of the same name and time is not looked at
        status = file.stat()
        file.write_bytes(b"x" * status.st_size)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    again, _ = data(root).make_dataset("test").__getitems__([0, 1])
    assert torch.equal(images, again)


def test_mistakes_are_told_in_lines(tmp_path: Path) -> None:
    root = write_images(tmp_path / "pets", classes=("cat", "dog"))
    (tmp_path / "flat").mkdir()
    (tmp_path / "empty").mkdir()
    (root / "cat" / "001.png").rename(tmp_path / "flat" / "a.png")
    write_images(tmp_path / "one", classes=("cat",))
    (write_images(tmp_path / "hole", classes=("cat", "cow")) / "dog").mkdir()
    for folder, message in (
        (tmp_path / "nope", "is not a folder"),
        (tmp_path / "empty", "has no images"),
        (tmp_path / "flat", "no folders that name their classes"),
        (tmp_path / "one", "at least two are needed"),
        (tmp_path / "hole", "has no images in dog"),
    ):
        with pytest.raises(UserError, match=message) as told:
            data(folder).infer_facts()
        assert len(str(told.value).splitlines()) <= 3


def test_unreadable_files_are_counted_listed_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = data(write_images(tmp_path / "pets", classes=("cat", "dog")))
    (tmp_path / "pets" / "cat" / "000.png").write_bytes(b"no image")
    parts = [images.make_dataset(split).rows for split in ("train", "val", "test")]
    assert sorted(np.concatenate(parts)) == list(range(1, 24))
    told = capsys.readouterr().out
    assert "1 of 24 files cannot be read and are left out: cat/000.png: cannot identify" in told
