"""The pictures in TensorBoard's files, which are records of a length, an event, and checksums."""

import mmap
import struct
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

PREFIX = "events.out.tfevents."
LENGTH = struct.Struct("<Q")
HEAD, TAIL = LENGTH.size + 4, 4  # bytes before and behind an event, each with a checksum
PNG = b"\x89PNG\r\n\x1a\n"
LEAST_BYTES = 120  # of an event with a picture; millions of numbers have shorter ones


def pictures_in(path: Path) -> list[tuple[str, int, bytes]]:
    """Names, steps and PNGs of the pictures in a file, up to a place that is damaged.

    Only events that may hold a picture are read.
    """
    found: list[tuple[str, int, bytes]] = []
    start, size = 0, path.stat().st_size
    if not size:
        return found
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(PNG) < 0:
            return found
        while start + HEAD < size:
            (length,) = LENGTH.unpack_from(data, start)
            start, end = start + HEAD, start + HEAD + length
            if length >= LEAST_BYTES and end <= size:
                try:
                    event = Event.FromString(data[start:end])
                except DecodeError:
                    return found
                for value in event.summary.value:
                    if (png := value.image.encoded_image_string).startswith(PNG):
                        found.append((value.tag, int(event.step), png))
            start = end + TAIL
    return found
