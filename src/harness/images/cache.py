"""Packed images: each file is decoded once, into one array on the disk that later runs map.

A cache is a folder ``<root's name>-<key>`` with ``pixels.uint8``, the images one after another,
``index.json``, what they are, and in the same order their files in ``files.json`` and checksums of
their pixels in ``checksums.json``. The key is a hash
of the files' names, sizes and times and of the settings: where any of them changes, another cache
is made. Its name appears when it is complete. A lock beside it, which the system frees however a
process ends, lets one process pack while others wait, and protects what a run is using.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.files import FULL, PART, sync, write_durably
from harness.images.finding import Files
from harness.images.packing import decode_all

VERSION = 2  # of decoding and of the layout: another one makes another cache
INDEX, FILES, CHECKSUMS = "index.json", "files.json", "checksums.json"
PIXELS = "pixels.uint8"
OTHER = "or another folder with data.cache_dir=<folder>"
CHECKING = "Looking for images that cannot be read, as data.cache=false"
MEGABYTE = 10**6


@dataclass
class Packed:
    """What is known of files that were decoded once."""

    unreadable: dict[int, str]  # by position, with the reason
    checksums: list[int]  # of the pixels of each file, by which a run knows them again
    path: Path | None = None  # of the pixels, where they are kept
    lock: "Lock | None" = field(default=None, repr=False)  # held while this object is used


class Lock:
    """A lock on a file, which the system frees when the process ends.

    Args:
        path: of a file that stays empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            if not path.exists():
                raise
            # A cache that somebody else has made may be read all the same.
            self.file = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)

    def __reduce__(self) -> Any:  # in a spawned process the number means another file
        return _shared, (self.path,)

    def share(self) -> None:
        """Use what is locked, beside others that use it."""
        self._wait(fcntl.LOCK_SH)

    def take(self) -> None:
        """Have it alone."""
        self._wait(fcntl.LOCK_EX)

    def _wait(self, kind: int) -> None:
        if not self.has(kind):
            print(f"Waiting for another process that packs images: {self.path}", flush=True)
            fcntl.flock(self.file, kind)

    def has(self, kind: int = fcntl.LOCK_EX) -> bool:
        """Lock without waiting; ``False`` where another process uses it."""
        try:
            fcntl.flock(self.file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _shared(path: Path) -> Lock:
    lock = Lock(path)
    lock.share()
    return lock


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        lock = _shared(lock_of(home))
        while not (home / INDEX).exists():
            lock.take()
            if not (home / INDEX).exists():
                _make(files, home, settings)
            lock.share()  # another process may come between, and remove it
        index = json.loads((home / INDEX).read_text())
    except OSError as error:
        if not keeps_pixels:  # nothing can be kept: every start reads all images once
            return Packed(*decode_all(files, side, channels, None, CHECKING))
        smaller = "a smaller data.packed_size, " if error.errno in FULL else ""
        raise UserError(
            f"Images cannot be packed into data.cache_dir={folder}: {error.strerror}.\n"
            f"Use {smaller}data.cache=false, {OTHER}."
        ) from error
    unreadable = {int(row): text for row, text in index["unreadable"].items()}
    checksums = json.loads((home / CHECKSUMS).read_text())
    return Packed(unreadable, checksums, home / PIXELS if keeps_pixels else None, lock)


def key_of(files: Files, settings: dict[str, Any]) -> str:
    """A hash of what the pixels depend on; where the files lie is none of it."""
    return hashlib.sha256(json.dumps([settings, *_listed(files)]).encode()).hexdigest()[:16]


def _listed(files: Files) -> list[Any]:
    return [files.names, files.sizes.tolist(), files.times.tolist()]


def lock_of(home: Path) -> Path:
    """The lock of a cache; it is never removed, as another process may just be opening it."""
    return home.with_name(f".{home.name}.lock")


def _make(files: Files, home: Path, settings: dict[str, Any]) -> None:
    """Pack into a folder of another name, which becomes the cache when it is complete."""
    side, channels, keeps = settings["side"], settings["channels"], settings["pixels"]
    num_files = len(files.names)
    num_bytes = num_files * side * side * channels if keeps else 0
    if keeps:
        _check_room(home.parent, num_bytes)
        megabytes = f"{-(-num_bytes // MEGABYTE):,} MB"
        print(f"Packing {num_files:,} images of {files.root} into {home}: {megabytes}", flush=True)
    part = home.with_name(f".{home.name}{PART}")
    shutil.rmtree(home, ignore_errors=True)  # of which a killed removal has left a part
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        pixels = part / PIXELS if keeps else None
        if pixels:
            with pixels.open("xb") as file:
                file.truncate(num_bytes)  # what cannot be read stays 0
        what = "Packing" if keeps else CHECKING
        unreadable, checksums = decode_all(files, side, channels, pixels, what)
        index = settings | {"root": str(files.root.absolute()), "num_images": num_files}
        index["unreadable"] = unreadable
        write_durably(part / FILES, json.dumps(_listed(files)).encode())
        write_durably(part / CHECKSUMS, json.dumps(checksums).encode())
        write_durably(part / INDEX, json.dumps(index, indent=1).encode())
        if pixels:
            sync(pixels)
        part.rename(home)
        sync(home.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _remove_outdated(home, index)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UserError(
            f"The packed images need {-(-num_bytes // MEGABYTE):,} MB, and {folder} has "
            f"{free // MEGABYTE:,} MB left.\nUse a smaller data.packed_size, data.cache=false, "
            f"{OTHER}."
        )


def sweep(folder: Path) -> None:
    """Remove what processes have left that were killed while they packed."""
    for part in folder.glob(f".*{PART}"):
        home = part.with_name(part.name[1:].removesuffix(PART))
        with suppress(OSError):
            lock = Lock(lock_of(home))  # held until the next one
            if lock.has():
                shutil.rmtree(part, ignore_errors=True)


def _remove_outdated(home: Path, index: dict[str, Any]) -> None:
    """Remove earlier packings of the same images, and name those with other settings.

    The new one has the same settings and other files: nobody asks for the earlier one again,
    unless a run is using it.
    """
    others = []
    for path in sorted(home.parent.glob(f"*/{INDEX}")):
        try:
            other = json.loads(path.read_text())
        except (OSError, ValueError):  # another process is just removing it
            continue
        if path.parent == home or other.get("root") != index["root"]:
            continue
        is_outdated = all(other.get(name) == index[name] for name in ("side", "channels", "pixels"))
        lock = Lock(lock_of(path.parent))  # held until the next one
        if is_outdated and lock.has():
            path.unlink()  # first, so that what is left never looks complete
            shutil.rmtree(path.parent, ignore_errors=True)
            print(f"Removed {path.parent}: its images have changed", flush=True)
        else:
            size = sum(file.stat().st_size for file in path.parent.iterdir())
            others.append(f"{path.parent} ({size / MEGABYTE:,.0f} MB)")
    if others:
        print(f"Other packings of these images, to remove by hand: {', '.join(others)}", flush=True)
