"""Which checkpoints a run has, and whether the checksums of one hold.

Imports no torch: a command finds its checkpoint before the framework is there.
"""

import os
import re
import zipfile
import zlib
from pathlib import Path

from harness.errors import UserError
from harness.files import PARTIAL

NEWEST = "last.ckpt"  # a link to the newest
END_RECORD = 22  # bytes; torch writes archives without a comment behind it


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; ``torch.load`` takes a flipped bit for a weight.

    It also builds whatever a file stands for: gigabytes of zeros that a zip has compressed, lists
    of lists of the same lists. The converter reads the file as data, and within a budget.
    """
    from harness.convert.checkpoint import Checkpoint
    from harness.convert.tensors import CheckpointError

    try:
        with path.open("rb") as file:
            file.seek(-min(END_RECORD, file.seek(0, os.SEEK_END)), os.SEEK_END)
            end = file.read()
            if len(end) < END_RECORD or not (end.startswith(b"PK\5\6") and end.endswith(b"\0\0")):
                return "it is cut off, or has bytes behind its end"
            # One that trains may have long histories of numbers, and small weights.
            with Checkpoint(path, allowance=12_000_000 + 8 * file.tell()) as opened:
                opened.check_size()
            with zipfile.ZipFile(file) as archive:
                # torch.serialization.set_crc32_options(False) leaves every checksum zero.
                has_checksums = any(member.CRC for member in archive.infolist())
                member = archive.testzip() if has_checksums else None
    except CheckpointError as error:
        return str(error)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:
        return str(error)  # a RuntimeError is of flags that only damage can have set
    return f"the checksum of {member} does not hold" if member else None


def verified(path: Path) -> Path:
    """Return the same path, or raise a ``UserError`` if a checksum of it does not hold."""
    if reason := damage(path):
        raise UserError(
            f"checkpoint={path} is not a checkpoint, or is damaged ({reason}).\n"
            "Use another checkpoint of the run, such as last.ckpt."
        )
    return path


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step_{step}.ckpt"


def by_step(folder: Path) -> list[Path]:
    """Return the checkpoints that a run can go on from, the newest last."""
    paths = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+\.ckpt", path.name)]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("step_")))


def link_newest(path: Path) -> None:
    """Let ``last.ckpt`` point to ``path``, which is in the same folder."""
    link(path.with_name(NEWEST), path.name)


def link(path: Path, target: str) -> None:
    """Let ``path`` point to another file of its folder, at no time to nothing."""
    part = path.with_name(f".{path.name}{PARTIAL}")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    part.replace(path)


def remove_old(folder: Path, num_kept: int) -> None:
    """Remove all but the newest; call it when the newest is safe."""
    for path in by_step(folder)[:-num_kept]:
        path.unlink(missing_ok=True)


def set_aside_newer(path: Path) -> None:
    """Rename the damaged checkpoints that are newer than ``path``: they count no more."""
    paths = by_step(path.parent)
    for newer in paths[paths.index(path) + 1 :]:
        newer.replace(newer.with_name(newer.name + ".damaged"))
