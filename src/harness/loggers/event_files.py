"""TensorBoard's files: records that have checksums of their own, with an event in each."""

import mmap
import struct
import zlib
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

PREFIX = "events.out.tfevents."
LENGTH = struct.Struct("<Q")  # a record is a length with its checksum, data, another checksum
CHECKSUM = struct.Struct("<I")
HEAD = LENGTH.size + CHECKSUM.size
PIECE_BYTES = 2**20
PNG = b"\x89PNG\r\n\x1a\n"
LEAST_BYTES = 120  # of a record with a picture; millions of numbers have shorter ones


class Record(NamedTuple):
    """A whole record of a file."""

    start: int  # of its bytes in the file
    end: int
    raw: bytes
    event: Any


def read_events(path: Path) -> list[Record]:
    """All whole records of a file. After damage, the next one is searched for."""
    data = path.read_bytes()
    found = []
    start = 0
    while start + HEAD < len(data):
        if record := whole_record(data, start):
            found.append(record)
            start = record.end
        else:
            start += 1
    return found


def whole_record(data: bytes, start: int) -> Record | None:
    """The record that begins at a place, if both of its checksums hold."""
    (size,) = LENGTH.unpack_from(data, start)
    end = start + HEAD + size + CHECKSUM.size
    if size == 0 or end > len(data) or not is_head(data, start):
        return None
    body = data[start + HEAD : end - CHECKSUM.size]
    try:
        event = Event.FromString(body)
    except DecodeError:
        return None
    (checksum,) = CHECKSUM.unpack_from(data, end - CHECKSUM.size)
    return Record(start, end, data[start:end], event) if checksum == masked_crc32c(body) else None


def is_head(data: bytes, start: int) -> bool:
    """Whether a length stands at a place, with its checksum."""
    (checksum,) = CHECKSUM.unpack_from(data, start + LENGTH.size)
    return bool(checksum == masked_crc32c(data[start : start + LENGTH.size]))


def record_of(**event: Any) -> Record:
    """The record of an event, which is in no file yet."""
    made, file = Event(**event), BytesIO()
    RecordWriter(file).write(made.SerializeToString())
    return Record(0, 0, file.getvalue(), made)


def scalars(event: Any) -> dict[str, float]:
    """The numbers in an event by their tags, as far as ``add_scalar`` has written them."""
    return {v.tag: v.simple_value for v in event.summary.value if v.HasField("simple_value")}


def count_values(events: Iterable[Any], num_values: dict[str, Any]) -> dict[str, Any]:
    """Count what events hold: values by their tags, others by a word such as ``graph_def``.

    What is logged twice in a row counts once, as the epoch does, which comes with every metric.

    Args:
        events: to count.
        num_values: counts of those before, each with a checksum of the last value; is changed.
    """
    for event in events:
        kind = event.WhichOneof("what")
        found = [(value.tag, value) for value in event.summary.value]
        if kind not in (None, "summary", "file_version"):
            found = [(kind, event)]
        for tag, value in found:
            checksum = zlib.crc32(value.SerializeToString(), event.step & 0xFFFFFFFF)
            num, last = num_values.get(tag, (0, None))
            num_values[tag] = (num + (checksum != last), checksum)
    return num_values


def unread(name: str) -> dict[str, Any]:
    """The state of a file of which nothing has been read: see ``read_on``."""
    return {"name": name, "length": 0, "crc32": 0, "values": {}}


def read_on(state: dict[str, Any], path: Path) -> None:
    """Take what was written since the last call into a file's state.

    Args:
        state: ``length`` in bytes, their ``crc32``, and ``values``: see ``count_values``.
        path: of the file, whose last record may still be incomplete.
    """
    with path.open("rb") as file:
        file.seek(state["length"])
        data = file.read()
    events, end = [], 0
    while end + HEAD <= len(data):
        size, is_damaged = LENGTH.unpack_from(data, end)[0], not is_head(data, end)
        if not is_damaged and end + HEAD + size + CHECKSUM.size > len(data):
            break
        record = whole_record(data, end)
        if record is None:  # no sum will hold, and the resume brings back what can be
            state["crc32"], end = -1, len(data)
            break
        events.append(record.event)
        end = record.end
    state["length"] += end
    if state["crc32"] >= 0:
        state["crc32"] = zlib.crc32(data[:end], state["crc32"])
    count_values(events, state["values"])


def begins_as(path: Path, state: dict[str, Any]) -> bool:
    """Whether the bytes that a state tells of are those at the beginning of a file."""
    left, crc32 = state["length"], 0
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            crc32 = zlib.crc32(piece, crc32)
    return bool(left == 0 and crc32 == state["crc32"])


def pictures_in(path: Path, start: int = 0, end: int | None = None) -> list[tuple[str, int, bytes]]:
    """Names, steps and PNGs of the pictures in a file, or in a part of it.

    Only records that may hold one are read and checked.

    Args:
        path: of the file.
        start: of a record.
        end: of a record; by default that of the file.
    """
    found: list[tuple[str, int, bytes]] = []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        end = size if end is None else min(end, size)
        if start >= end:
            return found
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.find(PNG, start, end) < 0:
                return found
            while start + HEAD < end:
                (length,) = LENGTH.unpack_from(data, start)
                stop = start + HEAD + length + CHECKSUM.size
                if length >= LEAST_BYTES and (record := whole_record(data[start:stop], 0)):
                    for value in record.event.summary.value:
                        image = value.image.encoded_image_string
                        if image.startswith(PNG):
                            found.append((value.tag, int(record.event.step), image))
                start = stop
    return found
