"""Parts of a text file, read some megabytes at a time: a file may be larger than memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness.errors import UserError

PIECE_BYTES = 2**22
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which some editors write before a text


class Source(NamedTuple):
    """A part of a file.

    Attributes:
        key: the setting that names the file, for messages.
        path: the file.
        start: the part's first byte.
        end: the byte after its last one.
    """

    key: str
    path: Path
    start: int
    end: int


def whole(key: str, name: str) -> Source:
    """All of a file, but for a byte order mark.

    Raises:
        UserError: if it cannot be read, or holds nothing.
    """
    path = Path(name)
    try:
        with path.open("rb") as file:
            start = len(BYTE_ORDER_MARK) if file.read(3) == BYTE_ORDER_MARK else 0
            size = os.fstat(file.fileno()).st_size
    except IsADirectoryError as error:
        raise UserError(f"{key}={name} is a folder.\nName a text file: {key}=<file>.") from error
    except OSError as error:
        raise UserError(f"{key}={name} cannot be read: {error.strerror}.") from error
    if size <= start:
        raise UserError(f"{key}={name} is empty.")
    return Source(key, path, start, size)


def cut(source: Source, shares: list[float]) -> list[Source]:
    """Cut a source into parts of these shares, where a line begins if one is near."""
    size, starts, total = source.end - source.start, [source.start], 0.0
    for share in shares[:-1]:
        total += share
        position = source.start + round(size * total)
        starts.append(_line_start(source, position) if share else starts[-1])
    ends = [*starts[1:], source.end]
    return [source._replace(start=s, end=e) for s, e in zip(starts, ends, strict=True)]


def _line_start(source: Source, position: int) -> int:
    """Where the first line from there on begins, or the first character where that is far."""
    position = max(position, source.start + 1)
    with source.path.open("rb") as file:
        file.seek(position - 1)
        near = file.read(max(5, min(4096, (source.end - source.start) // 100)))
    num_further = near.find(b"\n")
    if num_further < 0:
        num_further = next((i for i, byte in enumerate(near[1:]) if byte & 0xC0 != 0x80), 0)
    return min(position + num_further, source.end)


def pieces(source: Source, cuts_lines: bool) -> Iterator[bytes]:
    """The bytes of a source, piece by piece; a piece ends with a line.

    Args:
        source: a part of a file.
        cuts_lines: whether a line that is longer than a piece is cut between two words or
            characters; else it becomes one piece, however long it is.

    Raises:
        UserError: if the file has become shorter.
    """
    left, rest = source.end - source.start, b""
    with source.path.open("rb") as file:
        file.seek(source.start)
        while left:
            block = file.read(min(PIECE_BYTES, left))
            if not block:
                raise UserError(f"{source.key}={source.path} became shorter while it was read.")
            left, rest = left - len(block), rest + block
            size = rest.rfind(b"\n") + 1 if left else len(rest)
            if not size and cuts_lines:
                size = rest.rfind(b" ") if b" " in rest[1:] else _whole_characters(rest)
            if size:
                yield rest[:size]
                rest = rest[size:]


def _whole_characters(data: bytes) -> int:
    """Bytes of UTF-8 before the beginning of the last character."""
    size = len(data) - 1
    while size > max(1, len(data) - 4) and data[size] & 0xC0 == 0x80:
        size -= 1
    return size
