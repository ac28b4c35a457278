"""Damage the newest checkpoint in the ways that disks, copies and crashes do."""

import io
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from harness.checkpoints import lookup

PAGE = 4096


def damages(size: int, rng: random.Random) -> dict[str, Callable[[bytearray], bytearray]]:
    """Each kind, as what becomes of a file's bytes."""

    def cut(length: int) -> Callable[[bytearray], bytearray]:
        return lambda data: data[:length]

    def flip(data: bytearray) -> bytearray:
        data[rng.choice(value_bytes(data))] ^= 1 << rng.randrange(8)
        return data

    def zero_page(data: bytearray) -> bytearray:
        start = size // 2 // PAGE * PAGE
        data[start : start + PAGE] = bytes(PAGE)
        return data

    return {
        "empty": cut(0),
        "cut to 10 bytes": cut(10),
        "cut in the middle": cut(size // 2),
        "cut by a page": cut(size - PAGE),
        "cut by a byte": cut(size - 1),
        "a flipped bit": flip,
        "a page of zeros": zero_page,
        "all zeros": lambda data: bytearray(len(data)),
        "a byte behind the end": lambda data: data + b"\0",
        "a page behind the end": lambda data: data + bytes(PAGE),
    }


def value_bytes(data: bytes | bytearray, name: str = "") -> range:
    """Where the values are of the largest member whose name ends so.

    Between members is padding, which means nothing.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = (info for info in archive.infolist() if info.filename.endswith(name))
        member = max(members, key=lambda info: info.file_size)
    name_size, extra_size = struct.unpack_from("<HH", data, member.header_offset + 26)
    start = member.header_offset + 30 + name_size + extra_size
    return range(start, start + member.file_size)


def not_rejected(folder: Path, seed: int) -> list[str]:
    """The kinds after which the checkpoint before the damaged one was not taken."""
    *_, before, newest = lookup.by_step(folder)
    data = newest.read_bytes()
    failed = []
    for name, change in damages(len(data), random.Random(seed)).items():
        newest.write_bytes(change(bytearray(data)))
        path, skipped = lookup.newest_whole(folder)
        if path != before or len(skipped) != 1 or newest.name not in skipped[0]:
            failed.append(name)
    newest.write_bytes(data)
    assert lookup.newest_whole(folder) == (newest, [])
    return failed
