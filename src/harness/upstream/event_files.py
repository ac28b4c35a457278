"""Reads the records of TensorBoard's event files, up to the first damage.

TensorBoard has no public reader that tells where a record ends. Without that the curves of a run
that goes on from a checkpoint would show the steps after it twice. Seen in TensorBoard 2.18 to
2.21.
"""

import struct
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

PRIVATE = (
    "tensorboard.compat.proto.event_pb2:Event",
    "tensorboard.compat.tensorflow_stub.pywrap_tensorflow:masked_crc32c",
)

LENGTH = struct.Struct("<Q")  # a TFRecord is a length with its checksum, data, another checksum
CHECKSUM = struct.Struct("<I")


def read_events(path: Path) -> list[tuple[int, Any]]:
    """The whole records of a file, each after the position in bytes where it ends."""
    data = path.read_bytes()
    events = []
    start = 0
    while (body := start + LENGTH.size + CHECKSUM.size) <= len(data):
        header = data[start : start + LENGTH.size]
        start = body + LENGTH.unpack(header)[0] + CHECKSUM.size
        (checksum,) = CHECKSUM.unpack_from(data, body - CHECKSUM.size)
        if start > len(data) or checksum != pywrap_tensorflow.masked_crc32c(header):
            break  # it was being written when the process ended
        try:
            event = event_pb2.Event.FromString(data[body : start - CHECKSUM.size])
        except DecodeError:
            break
        events.append((start, event))
    return events
