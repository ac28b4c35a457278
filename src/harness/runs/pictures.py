"""The pictures that a run has sent to TensorBoard, taken out of its files. No torch."""

import mmap
import os
from contextlib import suppress
from pathlib import Path

from harness.loggers.event_files import CHECKSUM, HEAD, LENGTH, PREFIX, whole_record

PNG = b"\x89PNG\r\n\x1a\n"
LEAST = 120  # bytes of a record with a picture; millions of numbers have shorter ones


def pictures(run_dir: Path) -> dict[str, bytes]:
    """The newest picture of each name, such as ``test/confusion_matrix``, as a PNG.

    What is damaged, or is still being written, is left out.
    """
    found: dict[str, tuple[int, bytes]] = {}
    paths = run_dir.glob(f"tensorboard/**/{PREFIX}*")
    for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path.name)):
        with suppress(OSError):
            for name, step, data in _in_file(path):
                if name not in found or step >= found[name][0]:
                    found[name] = (step, data)
    return {name: data for name, (_, data) in found.items()}


def _in_file(path: Path) -> list[tuple[str, int, bytes]]:
    """Names, steps and pictures. Only records that may hold one are read and checked."""
    found: list[tuple[str, int, bytes]] = []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return found
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.find(PNG) < 0:
                return found
            start = 0
            while start + HEAD < size:
                (length,) = LENGTH.unpack_from(data, start)
                end = start + HEAD + length + CHECKSUM.size
                if length >= LEAST and (record := whole_record(data[start:end], 0)):
                    for value in record.event.summary.value:
                        image = value.image.encoded_image_string
                        if image.startswith(PNG):
                            found.append((value.tag, int(record.event.step), image))
                start = end
    return found
