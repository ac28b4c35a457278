"""Which files are images, and what their folders say of them."""

from pathlib import Path

import pytest

from harness import UserError
from harness.images.finding import Labelled, find_files, label
from tests.images.made import data, write_images


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def look(root: Path) -> Labelled:
    return label(find_files(root, "data.root"), "data.root")


def test_classes_are_folders_in_order_of_their_names(tmp_path: Path) -> None:
    names = ("dog/2.JPG", "dog/deep/1.jpeg", "cat/1.Png", "ant/x.webp", "ant/y.bmp", "ant/z.gif")
    found = look(touch(tmp_path, *names))
    assert found.counts() == {"ant": 3, "cat": 1, "dog": 2}
    assert found.files.names == sorted(names)
    assert set(found.splits) == {""}


def test_other_files_are_counted_by_their_suffix(tmp_path: Path) -> None:
    touch(tmp_path, "cat/1.jpg", "cat/a.txt", "dog/b.txt", "dog/2.png", "dog/c", "top.jpg")
    touch(tmp_path, ".DS_Store", ".hidden/3.jpg", "dog/._2.png")
    left_out = look(tmp_path).files.left_out
    assert left_out == {
        ".txt": 2,
        "without a suffix": 1,
        "hidden": 3,
        "images in no class folder": 1,
    }


def test_folders_of_splits_are_seen_above_the_classes(tmp_path: Path) -> None:
    for val in ("val", "valid", "validation"):
        root = tmp_path / f"of {val}"
        touch(root, "train/cat/1.jpg", f"{val}/dog/2.jpg", "Test/cat/3.jpg", "other/cat/4.jpg")
        found = look(root)
        assert dict(zip(found.files.names, found.splits, strict=True)) == {
            "train/cat/1.jpg": "train",
            f"{val}/dog/2.jpg": "val",
            "Test/cat/3.jpg": "test",
        }
        assert found.class_names == ["cat", "dog"]
        assert found.files.left_out == {"images in no class folder": 1}


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    found = look(touch(tmp_path, "train/1.jpg", "plane/2.jpg"))
    assert found.class_names == ["plane", "train"]
    assert set(found.splits) == {""}


def test_links_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    touch(tmp_path, "far/1.jpg", "root/dog/1.jpg")
    (tmp_path / "root" / "cat").symlink_to(tmp_path / "far")
    (tmp_path / "root" / "dog" / "up").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "dog" / "lost.jpg").symlink_to(tmp_path / "nowhere.jpg")
    found = look(tmp_path / "root")
    assert found.files.names == ["cat/1.jpg", "dog/1.jpg"]
    assert found.files.left_out == {"links to a folder above": 1, "broken links": 1}


def test_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    for i, (names, given, message) in enumerate(
        (
            ((), "none", r"data.root=.*none does not exist.\nGive a folder"),
            (("a.zip",), "a.zip", r"a.zip is a file.\nGive the folder that holds it"),
            ((), "", r"holds no images, but nothing at all.\nImages end in .jpg"),
            (("cat/1.tif", "cat/2.tif", "b/x.txt"), "", r"no images, but 2 .tif, 1 .txt.\n"),
            (("1.jpg", "2.jpg"), "", r"no folders that name their classes.\nPut .*/cat/1.jpg"),
        )
    ):
        root = tmp_path / str(i)
        root.mkdir()
        touch(root, *names)
        with pytest.raises(UserError, match=message) as error:
            look(root / given)
        assert str(error.value).count("\n") <= 1


def test_one_class_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", classes=("cat",))
    with pytest.raises(UserError, match=r"has one class, cat"):
        _ = data(tmp_path / "pets").facts
