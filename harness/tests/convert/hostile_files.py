"""Files that ask for more time or memory than they have bytes, each of about a given size.

`FILES` maps a name to a function of (folder, size in bytes, random.Random) that returns the path.
"""

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from .hostile_folders import FOLDERS
from .hostile_pickles import PICKLES, VALUES, Maker, Random
from .opcodes import (
    DICT,
    REBUILD,
    beside,
    dumped,
    get,
    legacy,
    plain,
    program,
    put,
    repeated,
    storage,
    tensor,
    zipped,
)

File = Callable[[Path, int, Random], Path]


def views(kind: int) -> File:
    """Many views of one storage, each a little further on."""

    def make(folder: Path, n: int, rng: Random) -> Path:
        num = n // 81 + 1
        numel = max(n // 8, 4 * num, 1000)  # as large as the pickle
        shape, stride = [
            ((numel - num,), (1,)),
            ((1 << 20, (numel - num) // 2), (0, 2)),
            ((2,) * 60, (0,) * 50 + ((numel - num) // 20,) * 10),
        ][kind]  # fmt: skip
        head = (
            storage(numel=numel) + put(7) + b"0" + plain(shape) + put(8) + b"0"
            + plain(stride) + put(9) + b"0" + REBUILD + put(6) + b"0" + DICT
        )  # fmt: skip
        entries = (
            b"\x8c\x3c%060x" % i + get(6) + b"(" + get(7) + dumped(i) + get(8) + get(9) + b"\x89NtR"
            for i in range(num)
        )
        data = b"\x80\x04" + head + b"".join(entries) + b"u."
        return zipped(folder / "a", data, {"0": bytes(4 * numel)})

    return make


def expanded(folder: Path, n: int, rng: Random) -> Path:
    numel = rng.choice([1 << 29, 1 << 62])
    return zipped(folder / "a", b"\x80\x02" + DICT + dumped("a") + tensor((numel,), (0,)) + b"u.")


def overlapping_entries(folder: Path, n: int, rng: Random) -> Path:
    """A zip of which many entries are one region of the file."""
    num = n // 120 + 2
    weights = b"".join(
        dumped(f"{i:x}") + tensor((1,), (1,), 0, storage(str(i), n // 4)) for i in range(num)
    )
    path = zipped(folder / "a", b"\x80\x02" + DICT + weights + b"u.", {"0": bytes(n // 4 * 4)})
    with zipfile.ZipFile(path, "a") as archive:
        infos = {info.filename: info for info in archive.infolist()}
        for i in range(1, num):
            info = zipfile.ZipInfo(f"archive/data/{i}")
            first = infos["archive/data/0"]
            info.header_offset, info.CRC = first.header_offset, first.CRC
            info.file_size = info.compress_size = first.file_size
            archive.filelist.append(info)
        archive.filelist.sort(key=lambda info: info.filename)
        archive._didModify = True
    return path


def sparse_pickle(folder: Path, n: int, rng: Random) -> Path:
    """A data.pkl of which the disk holds next to nothing, within one text or after it."""
    size, path = 500_000_000, folder / "a"
    head = b"\x80\x04\x8e" + struct.pack("<Q", size - rng.choice([40, 400, 4000, size // 2]))
    with zipfile.ZipFile(path, "w") as archive:
        position = archive.fp.tell()
        info = zipfile.ZipInfo("a/data.pkl")
        info.file_size = info.compress_size = size
        info.header_offset, info.CRC = position, 0  # no entry has a checksum
        archive.fp.write(info.FileHeader(True) + head)
        archive.fp.seek(size - len(head), io.SEEK_CUR)
        archive.fp.write(b"0N.")
        archive.start_dir = archive.fp.tell()
        archive.filelist.append(info)
        archive._didModify = True
    return path


def safetensors(path: Path, text: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


HEADERS: dict[str, Callable[[int], bytes]] = {
    "json_nested": lambda n: b'{"a":' + b"[" * n,
    "json_number": lambda n: b'{"a":' + b"7" * n + b"}",
    "json_tensors": lambda n: json.dumps(
        {f"{i:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(n // 50)},
        separators=(",", ":"),
    ).encode(),
}


def in_container(make: Maker, wrap: Callable[[bytes], bytes] = bytes) -> File:
    """The pickle in a zip, mostly, in a legacy file, or as .metadata."""

    def made(folder: Path, n: int, rng: Random) -> Path:
        data = wrap(make(n, rng))
        container = rng.random()
        if container < 0.7:
            return zipped(folder / "a", data)
        if container < 0.9:
            return legacy(folder / "a", data)
        (folder / "a").mkdir(exist_ok=True)
        (folder / "a" / ".metadata").write_bytes(data)
        return folder / "a"

    return made


def legacy_keys(folder: Path, n: int, rng: Random) -> Path:
    keys = dumped(10**4200) + put(8) + b"0](" + repeated(b"h\x08", n // 2) + b"e"
    return legacy(folder / "a", program(b"N"), keys)


FILES: dict[str, File] = {
    **{name: in_container(make, program) for name, make in VALUES.items()},
    **{f"{name}_beside": in_container(make, beside) for name, make in VALUES.items()},
    **{name: in_container(make) for name, make in PICKLES.items()},
    **FOLDERS,
    **{f"views_{kind}": views(kind) for kind in range(3)},
    **{
        name: (lambda folder, n, rng, make=make: safetensors(folder / "a", make(n)))
        for name, make in HEADERS.items()
    },
    "expanded": expanded,
    "overlapping_entries": overlapping_entries,
    "sparse_pickle": sparse_pickle,
    "legacy_keys": legacy_keys,
}
