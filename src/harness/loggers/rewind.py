import csv
import io
import logging
import os
import re
import struct
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from harness.files import sync, write_durably

log = logging.getLogger(__name__)

LENGTH = struct.Struct("<Q")  # a TFRecord is a length with its checksum, data, another checksum
CHECKSUM = struct.Struct("<I")


def sync_logs(run_dir: Path) -> None:
    """Make what is logged as safe as the checkpoint that is about to be written."""
    for path in (run_dir / "metrics.csv", *run_dir.glob("tensorboard/events.out.tfevents.*")):
        if path.exists():
            sync(path)


def rewind_logs(run_dir: Path, step: int) -> None:
    """Take out of a run's logs what it has logged at ``step`` and later, and will log again."""
    rewind_table(run_dir / "metrics.csv", step)
    rewind_events(run_dir / "tensorboard", step)


def rewind_table(path: Path, step: int) -> None:
    """Keep the rows of steps below ``step``; rows that were cut off or damaged are none of them."""
    if not path.exists():
        return
    text = path.read_bytes().decode(errors="replace")
    lines = text.replace("\0", "").split("\n")[:-1]  # the last one was cut off, or is empty
    columns = next(csv.reader(lines[:1]), ["step"])
    if "step" not in columns:
        path.replace(path.with_name(f"{path.name}.damaged"))
        log.warning("%s had lost its first line, and was set aside as .damaged.", path)
        return
    rows = [line.rstrip("\r").split(",") for line in lines[1:]]
    place = columns.index("step")
    whole = [row for row in rows if len(row) == len(columns) and re.fullmatch("[0-9]+", row[place])]
    if num_damaged := len(rows) - len(whole):
        log.warning("%d damaged rows were taken out of %s.", num_damaged, path)
    table = io.StringIO(newline="")
    csv.writer(table).writerows([columns, *(row for row in whole if int(row[place]) < step)])
    write_durably(path, table.getvalue().encode())


def rewind_events(folder: Path, step: int) -> None:
    """Cut TensorBoard's files off at the first value of ``step`` or later.

    A process writes several files, one after another, and the values' steps only grow; what was
    written after the cut goes, whichever file it is in. Files without values stay: one of them
    is this process's own.
    """
    found = [(path, read_events(path)) for path in folder.glob("events.out.tfevents.*")]
    found = [(path, all_) for path, all_ in found if any(e.HasField("summary") for _, e in all_)]
    is_cut = False
    for path, events in sorted(found, key=lambda pair: pair[1][0][1].wall_time):
        keep = 0
        for end, event in events:
            is_cut = is_cut or (event.HasField("summary") and event.step >= step)
            if is_cut:
                break
            keep = end
        if keep == 0:
            path.unlink()
        elif keep < path.stat().st_size:
            os.truncate(path, keep)


def read_events(path: Path) -> list[tuple[int, Any]]:
    """The whole records of a file with the positions of their ends, up to the first damage."""
    data = path.read_bytes()
    events = []
    start = 0
    while (body := start + LENGTH.size + CHECKSUM.size) <= len(data):
        header = data[start : start + LENGTH.size]
        start = body + LENGTH.unpack(header)[0] + CHECKSUM.size
        (checksum,) = CHECKSUM.unpack_from(data, body - CHECKSUM.size)
        if start > len(data) or checksum != masked_crc32c(header):
            break  # it was being written when the process ended
        try:
            event = Event.FromString(data[body : start - CHECKSUM.size])
        except DecodeError:
            break
        events.append((start, event))
    return events
