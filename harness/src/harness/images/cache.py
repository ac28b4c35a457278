"""Packed images: each file is decoded once, into one array on the disk that later runs map.

A cache is a folder ``<root's name>-<key>`` with ``pixels.uint8``, the images one after another,
``index.json``, what they are, and in the same order checksums of their pixels in
``checksums.json``. The key is a hash of the files' names, sizes and times and of the settings:
where any of them changes, another cache is made. See ``harness.data.caching`` for what several
processes, and a killed one, leave.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.data.caching import cached, hashed
from harness.errors import UserError
from harness.files import sync, write_durably
from harness.images.finding import Files
from harness.images.packing import decode_all

VERSION = 3  # of decoding and of the layout: another one makes another cache
INDEX, CHECKSUMS, PIXELS = "index.json", "checksums.json", "pixels.uint8"
CHECKING = "Looking for images that cannot be read, as data.cache=false"
MEGABYTE = 10**6


@dataclass
class Packed:
    """What is known of files that were decoded once."""

    unreadable: dict[int, str]  # by position, with the reason
    checksums: list[int]  # of the pixels of each file, by which a run knows them again
    path: Path | None = None  # of the pixels, where they are kept


def packed(
    files: Files, folder: Path, side: int, channels: int, *, keeps_pixels: bool = True
) -> Packed:
    """Decode files, or find what an earlier decoding has left.

    Args:
        files: what to decode.
        folder: of all caches.
        side: of the packed squares, in pixels.
        channels: 1 or 3.
        keeps_pixels: ``False`` keeps only which files cannot be read.

    Raises:
        UserError: if the folder cannot be written, or its disk has no room.
    """
    settings = {"version": VERSION, "side": side, "channels": channels, "pixels": keeps_pixels}
    name = re.sub(r"\W+", "_", files.root.absolute().name) or "images"
    home = folder / f"{name}-{key_of(files, settings)}"
    others = [path for path in folder.glob(f"{name}-*") if path != home]
    if others and not home.exists():
        print(
            f"Other packings, to remove by hand: {', '.join(map(_with_size, others))}", flush=True
        )
    cached(home, lambda part: _make(files, part, settings))
    index = json.loads((home / INDEX).read_text())
    unreadable = {int(row): text for row, text in index["unreadable"].items()}
    checksums = json.loads((home / CHECKSUMS).read_text())
    return Packed(unreadable, checksums, home / PIXELS if keeps_pixels else None)


def key_of(files: Files, settings: dict[str, Any]) -> str:
    """A hash of what the pixels depend on; where the files lie is none of it."""
    return hashed([settings, files.names, files.sizes.tolist(), files.times.tolist()])


def _with_size(folder: Path) -> str:
    size = sum(file.stat().st_size for file in folder.iterdir())
    return f"{folder} ({size / MEGABYTE:,.0f} MB)"


def _make(files: Files, folder: Path, settings: dict[str, Any]) -> None:
    """Pack into a folder that becomes the cache when it is complete."""
    side, channels, keeps = settings["side"], settings["channels"], settings["pixels"]
    num_files = len(files.names)
    num_bytes = num_files * side * side * channels if keeps else 0
    if keeps:
        _check_room(folder.parent, num_bytes)
        megabytes = f"{-(-num_bytes // MEGABYTE):,} MB"
        where = folder.with_suffix("")
        print(f"Packing {num_files:,} images of {files.root} into {where}: {megabytes}", flush=True)
    folder.mkdir()
    pixels = folder / PIXELS if keeps else None
    if pixels:
        with pixels.open("xb") as file:
            file.truncate(num_bytes)  # what cannot be read stays 0
    what = "Packing" if keeps else CHECKING
    unreadable, checksums = decode_all(files, side, channels, pixels, what)
    index = settings | {"root": str(files.root.absolute()), "num_images": num_files}
    index["unreadable"] = unreadable
    write_durably(folder / CHECKSUMS, json.dumps(checksums).encode())
    write_durably(folder / INDEX, json.dumps(index, indent=1).encode())
    if pixels:
        sync(pixels)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UserError(
            f"The packed images need {-(-num_bytes // MEGABYTE):,} MB, and {folder} has "
            f"{free // MEGABYTE:,} MB left.\nUse a smaller data.packed_size, data.cache=false, "
            "or another folder with data.cache_dir=<folder>."
        )
