"""Image files: found below a folder, labelled by their folders, decoded into one array of bytes.

In: a folder. Out: names, classes, splits, and the array's folder in the cache. Next: images.py.
"""

import json
import os
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
    """List the image files at any depth below a folder, as sorted paths relative to it."""
    names = list[str]()
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(folder, name) for name in files if not name.startswith(".")]
        names += [p.relative_to(root).as_posix() for p in paths if p.suffix.lower() in SUFFIXES]
    if not names:
        problem = f"has no images ({', '.join(SUFFIXES)})" if root.is_dir() else "is no folder"
        raise UserError(f"{key}={root} {problem}. Name the folder of the images: {key}=<folder>")
    return sorted(names)


def read_folders(names: Sequence[str], root: Path) -> tuple[list[str], list[str], list[str]]:
    """Read class and split of each file from its folders; files outside of them are left out.

    Returns:
        The files, the class of each, and its split, ``""`` where no folder names splits.
    """
    tops = {name.split("/")[0] for name in names if "/" in name}
    has_splits = any(top.lower() in SPLITS for top in tops)
    if others := sorted(top for top in tops if top.lower() not in SPLITS) if has_splits else []:
        raise UserError(
            f"data.root={root} has folders of splits beside others: {', '.join(others[:5])}.\n"
            "Move the others away, or give one of the folders as data.root."
        )
    depth = int(has_splits)  # of the folder that names the class
    parts = {name: name.split("/") for name in names if name.count("/") > depth}
    classes = [part[depth] for part in parts.values()]
    if not classes:
        raise UserError(
            f"data.root={root} has images, and no folders that name their classes.\n"
            f"Put the images of a class into a folder of its name: {root}/cat/{names[0]}"
        )
    folders = {path.name for path in root.glob("*/*" if has_splits else "*") if path.is_dir()}
    if empty := sorted(f for f in folders - {*classes} if not f.startswith(".")):
        raise UserError(
            f"data.root={root} has no images in {', '.join(empty[:5])}: fill or remove the folder."
        )
    return [*parts], classes, [SPLITS[p[0].lower()] if has_splits else "" for p in parts.values()]


def decode(path: Path, side: int) -> NDArray[np.uint8]:
    """Read an image as a square: its shorter side is scaled to ``side``, the middle is kept.

    EXIF rotation is applied, transparency laid on white; of 16 bits the upper 8 count.

    Returns:
        Shape (side, side, 3).
    """
    with Image.open(path) as file:
        file.draft("RGB", (side, side))  # a JPEG is decoded at 1/2, 1/4, 1/8 where that suffices
        image: Image.Image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I"):  # Pillow would cut off what is above 255
            image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    return np.asarray(square)


def decode_all(root: Path, names: Sequence[str], side: int, folder: Path) -> None:
    """Decode files into ``folder/pixels.npy``, (N, side, side, 3), in threads.

    ``unreadable.json`` has the reason for each file that could not be decoded; its pixels are 0.
    """
    folder.mkdir()
    path, shape = folder / "pixels.npy", (len(names), side, side, 3)
    pixels = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and a crash below
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
        ThreadPoolExecutor() as threads,
    ):  # Pillow releases Python's lock
        warnings.simplefilter("ignore")  # about damaged metadata beside the pixels
        rows = threads.map(decode_one, range(len(names)))
        for _ in track(rows, f"Decoding {len(names):,} images", len(names), transient=True):
            pass
    pixels.flush()
    (folder / "unreadable.json").write_text(json.dumps(unreadable))
