"""Find image files, read their classes from their folders, and decode them into one uint8 array.

In: a folder. Out: file names, classes, splits, and the array in the cache. Next: images.py.
"""

import json
import os
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from rich.progress import track

from harness import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def find_images(root: Path, key: str) -> list[str]:
    """List the image files at any depth below a folder, as sorted paths relative to it.

    Args:
        root: the folder.
        key: the key that names the folder, for messages.
    """
    names = list[str]()
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(folder).relative_to(root).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        images = (name for name in files if name.lower().endswith(SUFFIXES))
        names += [prefix + name for name in images if not name.startswith(".")]
    if not names:
        problem = f"has no images ({', '.join(SUFFIXES)})" if root.is_dir() else "is not a folder"
        raise UserError(f"{key}={root} {problem}. Name the folder of the images: {key}=<folder>")
    return sorted(names)


def read_folders(names: Sequence[str], root: Path) -> tuple[list[str], list[str], list[str]]:
    """Read the class and split of each file from its path; leave out files without a class folder.

    Returns:
        The files, the class of each, and the split of each; ``""`` if no folder names splits.
    """
    tops = {name.partition("/")[0] for name in names if "/" in name}
    has_splits = any(top.lower() in SPLITS for top in tops)
    if others := sorted(top for top in tops if top.lower() not in SPLITS) if has_splits else []:
        raise UserError(
            f"data.root={root} has folders of splits and other folders: {', '.join(others[:5])}.\n"
            "Move the other folders away, or set data.root to the folder that contains only train, "
            "val and test."
        )
    depth = int(has_splits)  # position of the class folder in a path
    names_in_classes = [name for name in names if name.count("/") > depth]
    # One string per class, not one per file.
    classes = [sys.intern(name.split("/", depth + 1)[depth]) for name in names_in_classes]
    if not classes:
        folder, _, file = max(names, key=lambda name: name.count("/")).rpartition("/")
        raise UserError(
            f"data.root={root} has images, but no folders that name their classes.\n"
            "Put the images of each class into a folder with the name of the class, such as "
            f"{Path(root, folder, 'cat', file)}"
        )
    folders = {path.name for path in root.glob("*/*" if has_splits else "*") if path.is_dir()}
    if empty := sorted(f for f in folders - {*classes} if not f.startswith(".")):
        raise UserError(
            f"data.root={root} has no images in {', '.join(empty[:5])}.\n"
            "Add images, or remove the folder."
        )
    if not has_splits:
        return names_in_classes, classes, [""] * len(classes)
    splits = [SPLITS[name.partition("/")[0].lower()] for name in names_in_classes]
    return names_in_classes, classes, splits


def decode(path: Path, side: int) -> NDArray[np.uint8]:
    """Read an image, scale its shorter side to ``side``, and crop the central square.

    EXIF rotation is applied. Transparency becomes white. Images of 16 bits lose the lower 8 bits.

    Returns:
        Shape (side, side, 3).
    """
    with Image.open(path) as file:
        file.draft("RGB", (side, side))  # decodes a JPEG at 1/2, 1/4 or 1/8 if that is enough
        image: Image.Image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I"):  # Pillow would clip values at 255
            image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    return np.asarray(square)


def decode_all(root: Path, names: Sequence[str], side: int, folder: Path) -> None:
    """Decode files in threads into ``folder/pixels.npy``, shape (N, side, side, 3).

    ``folder/unreadable.json`` maps each file that cannot be decoded to the error; its pixels are 0.
    """
    folder.mkdir()
    path, shape = folder / "pixels.npy", (len(names), side, side, 3)
    pixels = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    if hasattr(os, "posix_fallocate"):  # raises an error on a full disk; a mapped write would crash
        with path.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, path.stat().st_size)
    unreadable: dict[str, str] = {}

    def decode_one(row: int) -> None:
        try:
            pixels[row] = decode(root / names[row], side)
        except Exception as error:  # Pillow raises many kinds for damaged files
            unreadable[names[row]] = " ".join(str(error).split())[:200] or type(error).__name__

    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor() as threads,  # Pillow releases Python's lock
    ):
        warnings.simplefilter("ignore")  # Pillow warns of damaged metadata
        rows = threads.map(decode_one, range(len(names)))
        for _ in track(rows, f"Decoding {len(names):,} images", len(names), transient=True):
            pass
    pixels.flush()
    (folder / "unreadable.json").write_text(json.dumps(unreadable))
