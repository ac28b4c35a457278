"""Damage a checkpoint in the ways that disks, copies and crashes do."""

import io
import struct
import zipfile

PAGE = 4096


def damages(data: bytes) -> dict[str, bytes]:
    """Return a file's bytes after damage, by its kind."""
    middle = len(data) // 2 // PAGE * PAGE
    flipped = bytearray(data)
    flipped[value_bytes(data)[1000]] ^= 1
    return {
        "empty": b"",
        "cut to 10 bytes": data[:10],
        "cut in the middle": data[: len(data) // 2],
        "cut by a page": data[:-PAGE],
        "cut by a byte": data[:-1],
        "a flipped bit": bytes(flipped),
        "a page of zeros": data[:middle] + bytes(PAGE) + data[middle + PAGE :],
        "all zeros": bytes(len(data)),
        "a byte behind the end": data + b"\0",
        "a page behind the end": data + bytes(PAGE),
    }


def value_bytes(data: bytes | bytearray, name: str = "") -> range:
    """Return the position of the values of the largest member whose name ends so.

    Between members is padding, which means nothing.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = (info for info in archive.infolist() if info.filename.endswith(name))
        member = max(members, key=lambda info: info.file_size)
    name_size, extra_size = struct.unpack_from("<HH", data, member.header_offset + 26)
    start = member.header_offset + 30 + name_size + extra_size
    return range(start, start + member.file_size)
