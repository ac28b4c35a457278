import csv
import os
import struct
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event

HEADER, CHECKSUM = (
    struct.Struct("<Q4x"),
    4,
)  # of a TFRecord: length with its checksum, data, another


def rewind_logs(run_dir: Path, checkpoint: str | None) -> None:
    """Take out of a run's logs what it logged after ``checkpoint``, and will log again."""
    step = 0
    if checkpoint is not None:
        loops = torch.load(checkpoint, mmap=True, map_location="cpu", weights_only=True)["loops"]
        step = loops["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
    rewind_table(run_dir / "metrics.csv", step)
    rewind_events(run_dir / "tensorboard", step)


def rewind_table(path: Path, step: int) -> None:
    """Keep the rows of steps below ``step``; a last row that was cut off is not one of them."""
    if not path.exists():
        return
    with path.open(newline="") as file:
        text = file.read()
    whole = text[: text.rfind("\n") + 1].splitlines()  # no row that was cut off
    reader = csv.DictReader(whole)
    columns = list(reader.fieldnames or ["step"])
    rows = [row for row in reader if int(row["step"]) < step]
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)
    part.replace(path)


def rewind_events(folder: Path, step: int) -> None:
    """Cut TensorBoard's files off at the first value of ``step`` or later.

    A process writes several files, one after another, and the values' steps only grow; what was
    written after the cut goes, whichever file it is in.
    """
    files = {path: read_events(path) for path in folder.glob("events.out.tfevents.*")}
    is_cut = False
    for path in sorted(files, key=lambda path: files[path][0][1].wall_time if files[path] else 0):
        keep = 0
        for end, event in files[path]:
            is_cut = is_cut or (event.HasField("summary") and event.step >= step)
            if is_cut:
                break
            keep = end
        if keep == 0:
            path.unlink()
        elif keep < path.stat().st_size:
            os.truncate(path, keep)


def read_events(path: Path) -> list[tuple[int, Any]]:
    """The whole records of a file with the positions of their ends."""
    data = path.read_bytes()
    events = []
    start = 0
    while start + HEADER.size <= len(data):
        (length,) = HEADER.unpack_from(data, start)
        body = start + HEADER.size
        start = body + length + CHECKSUM
        if start > len(data):
            break  # it was being written when the process ended
        events.append((start, Event.FromString(data[body : body + length])))
    return events
