"""Files that must stay what a run has written: damage to them must not become a setting.

Imports only ``harness.errors`` and ``harness.files``: every part of the harness may use it.
"""

import zlib
from pathlib import Path

from harness.errors import UserError
from harness.files import write_durably

FIRST = "# Frozen with the run. crc32 of the lines below: {:08x}\n"
STARTED = "# started "  # begins a line of overrides.yaml


def write_yaml(path: Path, text: str) -> None:
    """Write YAML below a comment that has its checksum."""
    data = text.encode()
    write_durably(path, FIRST.format(zlib.crc32(data)).encode() + data)


def read_yaml(path: Path) -> str:
    """Read what ``write_yaml`` has written.

    Raises:
        UserError: if it is not what was written.
        OSError, ValueError: if it cannot be read, or is no text.
    """
    data = path.read_bytes()
    first, _, below = data.partition(b"\n")
    if first + b"\n" != FIRST.format(zlib.crc32(below)).encode():
        raise UserError(
            f"{path} is not what was frozen with the run: it was damaged, or edited.\n"
            "Bring it back from a copy. Another setting belongs in the command; what may not "
            "change there,\nsuch as a learning rate, belongs to another run: use resume=null."
        )
    return data.decode()


def write_json(path: Path, text: str) -> None:
    """Write JSON, which has no comments, with its checksum in a hidden file beside it."""
    data = text.encode()
    # In this order, a file that exists has its checksum whenever the power fails.
    path.unlink(missing_ok=True)
    write_durably(_checksum_of(path), f"{zlib.crc32(data):08x}\n".encode())
    write_durably(path, data)


def read_json(path: Path) -> bytes:
    """Read what ``write_json`` has written; a file without a checksum is read as it is.

    Raises:
        UserError: if it is not what was written.
        OSError: if it cannot be read.
    """
    data, checksum = path.read_bytes(), _checksum_of(path)
    if checksum.exists() and checksum.read_bytes() != f"{zlib.crc32(data):08x}\n".encode():
        raise UserError(
            f"{path} is not what the run has written: it was damaged, or edited.\n"
            f"metrics.csv has the run's numbers. If the edit is to count, remove {checksum}."
        )
    return data


def _checksum_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc32")
