"""The image files below a folder, with the classes and splits that their folders name."""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.errors import UserError
from harness.names import few

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}


@dataclass
class Files:
    """Image files in the order of their names, and what was left out."""

    root: Path
    names: list[str]  # below root
    sizes: NDArray[np.int64]  # bytes
    times: NDArray[np.int64]  # of the last change, nanoseconds
    left_out: Counter[str]  # what it is, and how many


@dataclass
class Labelled:
    """Image files with the class and the split of each."""

    files: Files
    class_names: list[str]  # sorted
    classes: NDArray[np.int64]  # (N,) positions in class_names
    splits: NDArray[np.str_]  # (N,) "train", "val" or "test"; "" where folders name none

    def counts(self) -> dict[str, int]:
        """Files of each class."""
        counts = np.bincount(self.classes, minlength=len(self.class_names)).tolist()
        return dict(zip(self.class_names, counts, strict=True))


def find_files(root: str | Path, key: str) -> Files:
    """Look for images at any depth; other files are counted by their suffix.

    Args:
        root: the folder.
        key: the setting that it comes from, for messages.

    Raises:
        UserError: if there is no such folder, or there are no images in it.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        if not os.path.lexists(root):
            raise UserError(f"{key}={root} does not exist.\nGive a folder: {key}=<folder>")
        raise UserError(
            f"{key}={root} is a file.\nGive the folder that holds it, or that an archive is "
            f"unpacked to: {key}=<folder>"
        )
    found: list[tuple[str, int, int]] = []
    left_out: Counter[str] = Counter()
    try:
        _look(root, "", found, left_out, frozenset())
    except OSError as error:
        raise UserError(f"{key}={root}: {error.filename}: {error.strerror}.") from error
    if not found:
        there = ", ".join(f"{num} {what}" for what, num in left_out.most_common(5))
        known = ", ".join(SUFFIXES)
        raise UserError(
            f"{key}={root} holds no images, but {there or 'nothing at all'}.\n"
            f"Images end in {known}, in capitals or not."
        )
    names, sizes, times = zip(*sorted(found), strict=True)
    return Files(root, list(names), np.array(sizes), np.array(times), left_out)


def _look(
    folder: Path | str,
    prefix: str,
    found: list[tuple[str, int, int]],
    left_out: Counter[str],
    above: frozenset[tuple[int, int]],
) -> None:
    """Collect images below a folder; hidden files and folders count as left out."""
    status = os.stat(folder)
    identity = (status.st_dev, status.st_ino)
    if identity in above:  # a link to a folder that holds it
        left_out["links to a folder above"] += 1
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.name.startswith("."):
                left_out["hidden"] += 1
            elif entry.is_dir():
                _look(entry.path, f"{prefix}{entry.name}/", found, left_out, above | {identity})
            elif suffix not in SUFFIXES:
                left_out[suffix or "without a suffix"] += 1
            elif entry.is_file():
                changed = entry.stat()
                # Not the time of its content, which copies and archives give to another file.
                found.append((prefix + entry.name, changed.st_size, changed.st_ctime_ns))
            else:
                left_out["broken links"] += 1


def label(files: Files, key: str) -> Labelled:
    """Read class and split of each file from its folders: class/..., or train/class/...

    What lies in no class folder is left out. ``files`` is changed in place.

    Raises:
        UserError: if nothing lies in class folders.
    """
    parts = [name.split("/") for name in files.names]
    of_splits = {p[0] for p in parts if len(p) > 2 and p[0].lower() in SPLITS}
    tops = {p[0] for p in parts if len(p) > 1}
    is_split = "train" in {SPLITS[top.lower()] for top in of_splits} or (tops and tops == of_splits)
    depth = 1 if is_split else 0  # of the folder that names the class
    kept = [
        i for i, p in enumerate(parts) if len(p) > depth + 1 and (not is_split or p[0] in of_splits)
    ]
    if not kept:
        raise UserError(
            f"{key}={files.root} has images, and no folders that name their classes.\n"
            f"Put the images of a class into a folder of its name, such as "
            f"{files.root}/cat/{parts[0][-1]}"
        )
    if num_out := len(parts) - len(kept):
        files.left_out["images in no class folder"] += num_out
    names = [parts[i][depth] for i in kept]
    class_names = sorted(set(names))
    position = {name: i for i, name in enumerate(class_names)}
    splits = [SPLITS[parts[i][0].lower()] if is_split else "" for i in kept]
    files.names = [files.names[i] for i in kept]
    files.sizes, files.times = files.sizes[kept], files.times[kept]
    classes = np.array([position[name] for name in names], dtype=np.int64)
    return Labelled(files, class_names, classes, np.array(splits))


def listed(items: Iterable[str], most: int = 12) -> str:
    """The first items of many, and how many more there are; any file name can be printed."""
    return few(items, most).encode(errors="backslashreplace").decode()
