"""Image files: found below a folder, labelled by their folders, decoded into one array."""

import json
import os
import warnings
from collections import Counter
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
    if not root.is_dir():
        raise UserError(
            f"{key}={root} is no folder.\nGive the folder of the images: {key}=<folder>"
        )
    names, others = list[str](), Counter[str]()
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder, name) for name in files if not name.startswith(".")):
            if path.suffix.lower() in SUFFIXES:
                names.append(path.relative_to(root).as_posix())
            else:
                others[path.suffix or path.name] += 1
    if not names:
        held = ", ".join(f"{num} {kind}" for kind, num in others.most_common(5)) or "no files"
        raise UserError(f"{key}={root} has no images ({', '.join(SUFFIXES)}); it has {held}.")
    return sorted(names)


def labelled(names: Sequence[str], root: Path) -> tuple[list[str], list[str], list[str]]:
    """Read class and split from the folders of files; files in no class folder are left out.

    Returns:
        The files, and for each its class and its split, ``""`` where no folder names splits.
    """
    tops = {name.split("/")[0] for name in names if "/" in name}
    of_splits = {top for top in tops if top.lower() in SPLITS}
    depth = 1 if of_splits else 0  # of the folder that names the class
    if of_splits and tops != of_splits:
        others = ", ".join(sorted(tops - of_splits)[:5])
        raise UserError(
            f"data.root={root} has folders of splits ({', '.join(sorted(of_splits))}) beside "
            f"others ({others}).\nMove the others away, or give one of the folders as data.root."
        )
    parts = [name.split("/") for name in names]
    kept = [i for i, part in enumerate(parts) if len(part) > depth + 1]
    if not kept:
        raise UserError(
            f"data.root={root} has images, and no folders that name their classes.\n"
            f"Put the images of a class into a folder of its name: {root}/cat/{parts[0][-1]}"
        )
    splits = [SPLITS[parts[i][0].lower()] if of_splits else "" for i in kept]
    return [names[i] for i in kept], [parts[i][depth] for i in kept], splits


def decode(path: Path, side: int, channels: int) -> NDArray[np.uint8]:
    """Read an image as a square: its shorter side is scaled to ``side``, the middle is kept.

    EXIF rotation is applied, transparency laid on white; of 16 bits the upper 8 count.

    Returns:
        Shape (side, side, channels).
    """
    mode = "L" if channels == 1 else "RGB"
    with Image.open(path) as file:
        file.draft(mode, (side, side))  # a JPEG is decoded at 1/2, 1/4, 1/8 where that suffices
        image: Image.Image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I"):  # Pillow would cut off what is above 255
            image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = ImageOps.fit(image.convert(mode), (side, side), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(side, side, channels)


def decode_all(root: Path, names: Sequence[str], side: int, channels: int, folder: Path) -> None:
    """Decode files into ``folder/pixels.npy``, (N, side, side, channels), in threads.

    Pillow decodes without Python's lock. ``unreadable.json`` has the reason for each file that
    could not be decoded; its pixels are 0.
    """
    folder.mkdir()
    path, shape = folder / "pixels.npy", (len(names), side, side, channels)
    pixels = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and a crash below
        with path.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, path.stat().st_size)
    unreadable: dict[str, str] = {}

    def decode_one(row: int) -> None:
        try:
            pixels[row] = decode(root / names[row], side, channels)
        except Exception as error:  # Pillow raises many kinds for damaged files
            unreadable[names[row]] = " ".join(str(error).split())[:200] or type(error).__name__

    with warnings.catch_warnings(), ThreadPoolExecutor() as threads:
        warnings.simplefilter("ignore")  # about damaged metadata beside the pixels
        # A small file that would fill the memory; Pillow only warns up to twice its limit.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        rows = threads.map(decode_one, range(len(names)))
        for _ in track(rows, f"Decoding {len(names):,} images", len(names), transient=True):
            pass
    pixels.flush()
    with (folder / "unreadable.json").open("w") as file:
        json.dump(unreadable, file)
        file.flush()
        os.fsync(file.fileno())
